"""Prices of single layers add up to the step, whatever the ranges."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.core.actions import Chunk, RunLayers
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import UNITS_PER_NANO
from squall.perf.layer_range import layers
from squall.perf.roofline import Roofline
from squall.sim.linear import Linear

LLAMA = Roofline(resolve_model("meta-llama/Llama-3.1-8B"), resolve_gpu("h100-sxm"))
LAYERS = 32


def batch(*tokens: int) -> RunLayers:
    return RunLayers(1, 0, LAYERS, tuple(Chunk(id, 0, count, 0, last=True) for id, count in enumerate(tokens)))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sets(st.integers(1, LAYERS - 1)))
def test_any_ranges_cost_together_what_the_step_does(tokens: list[int], cuts: set[int]) -> None:
    shape = batch(*tokens)
    edges = [0, *sorted(cuts), LAYERS]
    parts = [layers(LLAMA, shape, LAYERS, first, last) for first, last in pairwise(edges)]
    assert sum(parts) == LLAMA.run(shape, 1)[0].first // UNITS_PER_NANO
    assert min(parts) > 0


def test_the_first_layer_has_the_embedding_and_the_overhead_and_the_last_one_the_head() -> None:
    shape = batch(2000)
    each = [layers(LLAMA, shape, LAYERS, layer, layer + 1) for layer in range(LAYERS)]
    assert max(each[1:-1]) - min(each[1:-1]) <= 1
    assert each[0] - each[1] == pytest.approx(LLAMA.entry(2000), abs=2)
    assert each[-1] > each[1]


def test_a_model_that_tells_nothing_apart_has_equal_layers() -> None:
    assert [layers(Linear(16 * 700), batch(5), 7, layer, layer + 1) for layer in range(7)] == [100] * 7
