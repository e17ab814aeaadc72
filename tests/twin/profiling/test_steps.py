"""What a step costs beside its operators is found; an engine needs no checkpoint for that."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.errors import ModelError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.hardware import GPUS
from squall.perf.profile import Point
from squall.perf.roofline import RooflineSource
from squall.twin.profiling.steps import engine, fit_overhead, price, runs, whole_steps

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
SOURCE = RooflineSource(GPUS["a100-80g"])
MODEL = Composed(resolve_model("llama-3-8b"), "a100", Layout(), [SOURCE], SOURCE.efficiency, 0.0)
SHAPES = [Point(n, n * 300, 0, 0, False, 0.0) for n in (1, 2, 4, 8, 16)] + [
    Point(3, 900, n, 64, True, 0.0) for n in (64, 256, 512)
]


def with_overhead(step_s: float, noise: float = 0.0) -> list[Point]:
    factors = [1 + noise * (-1) ** index for index in range(len(SHAPES))]
    return [
        Point(p.num_decodes, p.decode_context, p.chunk_tokens, p.chunk_offset, p.last, factor * (price(MODEL, p) + step_s))
        for p, factor in zip(SHAPES, factors, strict=True)
    ]


@settings(max_examples=20)
@given(st.floats(0, 0.05))
def test_the_overhead_is_what_operators_do_not_explain(step_s: float) -> None:
    fit = fit_overhead(MODEL, with_overhead(step_s))
    assert fit.step_s == pytest.approx(step_s, abs=1e-8)
    assert fit.median_error < 1e-5
    assert fit.num_fitted + fit.num_held_out == len(SHAPES)


def test_errors_are_those_of_steps_that_were_not_fitted() -> None:
    fit = fit_overhead(MODEL, with_overhead(0.003, noise=0.05))
    assert 0.01 < fit.median_error <= fit.p90_error < 0.2


def test_operators_that_say_too_much_leave_no_overhead() -> None:
    halved = [Point(p.num_decodes, p.decode_context, p.chunk_tokens, p.chunk_offset, p.last, price(MODEL, p) / 2) for p in SHAPES]
    assert fit_overhead(MODEL, halved).step_s == 0.0


def test_an_engine_with_random_weights_takes_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert runs(tmp_path)
    ready = engine(tmp_path, num_blocks=512, block_size=16, max_model_len=512, device="cpu", dtype="fp32", threads=1)
    points = whole_steps(ready, clock=iter(range(0, 10**9, 1000)).__next__)
    taken = [next(points) for _ in range(12)]
    assert (taken[0].num_decodes, taken[0].chunk_tokens, taken[0].last) == (0, 64, True)
    assert min(point.seconds for point in taken) > 0
    assert max(point.num_decodes for point in taken) >= 2


def test_where_no_step_fits_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ready = engine(tmp_path, num_blocks=1, block_size=16, max_model_len=512, device="cpu", dtype="fp32", threads=1)
    assert next(whole_steps(ready, clock=lambda: 0), None) is None


def test_a_model_that_the_engine_does_not_run_is_known_before(tmp_path: Path) -> None:
    assert not runs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "deepseek_v3"}))
    assert not runs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "gelu"}))
    with pytest.raises(ModelError, match="hidden_act is 'gelu'"):
        runs(tmp_path)
