import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError
from squall.perf.catalogue import CONFIGS, resolve_model
from squall.perf.composed import Composed, Surface, interval_of, shares_of
from squall.perf.decompose import Layout
from squall.perf.efficiency import Efficiency, efficiency_of
from squall.perf.hardware import GPUS
from squall.perf.layers import Attention, Mlp
from squall.perf.operators import AttentionShape, Estimate, Provenance
from squall.perf.roofline import RooflineSource, layout_of
from squall.perf.spec import Layers, ModelSpec
from squall.perf.speculation import Speculation

H100 = GPUS["h100-sxm"]
SMALL = ModelSpec("small", "llama", 64, 1000, 512, (Layers(5, Attention(8, 2, 8), Mlp(96), 128),), final_norm=64)
BARE: Efficiency = replace(efficiency_of(H100), wait_s=0.0, step_s=0.0)
MICRO = 1e-6
ALONE = Layout()


class Round:
    """Round times: a product 10 us, a pass 1 us, attention 2 us and what is given for a token, collectives by their verb."""

    name = "round"

    def __init__(self, context_s: float = 0.0) -> None:
        self.context_s = context_s

    def gemm(self, tokens: int, rows: int, columns: int, dtype: str) -> Estimate:
        return _round(10)

    def moe(self, tokens: int, hidden: int, inter: int, experts: int, top_k: int, dtype: str, tp: int, ep: int) -> Estimate:
        return _round(50)

    def elementwise(self, num_bytes: int, kernel: str = "") -> Estimate:
        return _round(1)

    def sampling(self, rows: int) -> Estimate:
        return _round(3)

    def decode_attention(self, batch: int, context: int, shape: AttentionShape) -> Estimate:
        return _round(2 + batch * context * self.context_s / MICRO)

    def prefill_attention(self, chunk: int, before: int, shape: AttentionShape) -> Estimate:
        return _round(4)

    def all_reduce(self, num_bytes: int, gpus: int) -> Estimate:
        return _round(20)

    def all_gather(self, num_bytes: int, gpus: int) -> Estimate:
        return _round(11)

    def reduce_scatter(self, num_bytes: int, gpus: int) -> Estimate:
        return _round(12)

    def all_to_all(self, num_bytes: int, gpus: int) -> Estimate:
        return _round(13)

    def send(self, num_bytes: int, gpus: int) -> Estimate:
        return _round(100)


def _round(micros: float) -> Estimate:
    return Estimate(micros * MICRO, Provenance.MEASURED, 0.1)


class OnlyProducts(Round):
    """Knows matrix products, and nothing else."""

    name = "products"

    def __getattribute__(self, attribute: str) -> object:
        if attribute in ("gemm", "name"):
            return object.__getattribute__(self, attribute)
        return lambda *_: None


def composed(layout: Layout = ALONE, **more: object) -> Composed:
    return Composed(SMALL, "a gpu", layout, [Round()], BARE, **more)  # type: ignore[arg-type]


def decode(batch: int = 1, context: int = 10) -> RunSteps:
    return RunSteps(0, 1, batch, batch * context)


def micros(model: Composed, shape: RunSteps) -> float:
    return model.run(shape, 1)[0].first / 16e3


# products 4 x 10, norms 2, rotary, activation: 44 us a layer beside attention; head 10, sampling 3, final norm 1, embedding 1
LAYER, ENDS = 44 + 2, 15


def test_a_step_is_the_sum_of_its_operators() -> None:
    assert micros(composed(), decode()) == pytest.approx(5 * LAYER + ENDS)
    prompt = RunSteps(0, 1, 0, 0, (Chunk(0, 0, 8, 0, False),))
    assert micros(composed(), prompt) == pytest.approx(5 * (44 + 4) + 2)  # no logits


def test_stages_are_unequal_at_both_ends_and_hand_on() -> None:
    model = composed(Layout(pp=3))
    assert model.num_stages == 3
    assert model.stages(decode()) == ((2 * LAYER + 1 + 100) * 1000, (2 * LAYER + 100) * 1000, (1 * LAYER + 14) * 1000)
    assert micros(model, decode()) == pytest.approx(5 * LAYER + ENDS + 200)


def test_one_stage_lasts_as_long_as_the_step() -> None:
    model = composed()
    assert model.stages(decode()) == (model.run(decode(), 1)[0].first // 16,)


def test_handing_on_in_the_meantime_hides_behind_work_and_no_further() -> None:
    model = composed(Layout(pp=3, overlap_send=True))
    assert model.stages(decode()) == (100_000, 100_000, (LAYER + 14) * 1000)  # a send takes 100 us, two layers 92 or 93
    assert micros(model, decode()) == pytest.approx(5 * LAYER + ENDS + 200)  # the batch itself waits for it


def test_gpus_that_share_layers_talk_twice_a_layer() -> None:
    assert micros(composed(Layout(tp=2)), decode()) == pytest.approx(5 * (LAYER + 40) + ENDS + 20 + 11)
    parallel = composed(Layout(tp=2, sequence_parallel=True))
    assert micros(parallel, decode()) == pytest.approx(5 * (LAYER + 46) + ENDS + 23 + 11)


def test_overhead_waiting_and_launches_are_terms_of_their_own() -> None:
    assert micros(composed(overhead_s=50 * MICRO), decode()) == pytest.approx(5 * LAYER + ENDS + 50)
    waiting = Composed(SMALL, "a gpu", Layout(tp=2), [Round()], replace(BARE, wait_s=MICRO))
    assert micros(waiting, decode()) - micros(composed(Layout(tp=2)), decode()) == pytest.approx(5 * 2 + 1 + 1)
    launches = 5 * 9 + 4  # eight operators and attention a layer; embedding, final norm, head, sampling
    launched = composed(launch_s=1000 * MICRO)
    assert micros(launched, decode()) == pytest.approx(launches * 1000, rel=0.01)  # the CPU is the slower by far


def test_the_most_trustworthy_source_that_knows_an_operator_is_asked() -> None:
    roofline = RooflineSource(H100)
    model = Composed(SMALL, H100.name, Layout(), [OnlyProducts(), roofline], BARE)
    lines = model.explain(decode())
    assert {line.source for line in lines if line.kind == "token"} == {"products", "roofline"}
    assert {line.source for line in lines if line.kind == "sequence"} == {"roofline"}
    known = sum(line.seconds for line in lines if line.source == "products")
    assert known == pytest.approx(210 * MICRO)
    assert dict(shares_of(lines))[Provenance.MEASURED] == pytest.approx(known / sum(line.seconds for line in lines))
    assert re.fullmatch(r"measured \d+%, roofline \d+% \(small on 1 x h100-sxm, bf16\)", model.source)


def test_an_operator_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no source knows an operator"):
        Composed(SMALL, "a gpu", Layout(), [OnlyProducts()], BARE).run(decode(), 1)


def test_the_explanation_adds_up_to_the_price() -> None:
    model = Composed(resolve_model("llama-3-8b"), H100.name, Layout(tp=2), [RooflineSource(H100)], efficiency_of(H100))
    seconds, low, high = interval_of(model.explain(RunSteps(0, 1, 16, 16 * 1024, (Chunk(0, 0, 256, 0, True),))))
    price = model.run(RunSteps(0, 1, 16, 16 * 1024, (Chunk(0, 0, 256, 0, True),)), 1)[0].first / 16e9
    assert price == pytest.approx(seconds, rel=0.01)
    assert low < seconds < high


PIECES = st.lists(
    st.builds(Chunk, st.integers(0, 9), st.integers(0, 4000), st.integers(1, 1000), st.just(0), st.booleans()),
    min_size=1,
    max_size=5,
)


@given(st.integers(0, 100), st.integers(1, 5000), PIECES, st.sampled_from([Layout(), Layout(tp=2), Layout(tp=2, pp=2)]))
@settings(max_examples=60, deadline=None)
def test_the_explanation_of_several_prompts_adds_up_to_the_price(
    decodes: int, context: int, pieces: list[Chunk], layout: Layout
) -> None:
    model = Composed(resolve_model("gemma-3-12b"), H100.name, layout, [RooflineSource(H100)], efficiency_of(H100))
    step = RunSteps(0, 1, decodes, decodes * context, tuple(pieces))
    told = interval_of(model.explain(step))[0] * 1e9
    assert told == pytest.approx(model.run(step, 1)[0].first / 16, rel=0.01)
    assert told == pytest.approx(sum(model.stages(step)), rel=0.01)


def test_attention_of_several_prompts_is_told_as_one_call() -> None:
    model = composed()
    chunks = (Chunk(1, 0, 30, 0, True), Chunk(2, 40, 20, 0, False))
    [line] = [line for line in model.explain(RunSteps(0, 1, 7, 700, chunks)) if line.operator == "prefill attention"]
    assert (line.count, line.size) == (5, 50)
    assert line.seconds == pytest.approx(5 * 4 * MICRO)


@pytest.mark.parametrize("gpu", ["t4", "b200"])
def test_every_known_model_is_priced_in_two_stages_that_add_up(gpu: str) -> None:
    shape = RunSteps(0, 1, 16, 16 * 2000, (Chunk(0, 100, 1000, 0, True),))
    for name in CONFIGS:
        model = resolve_model(name)
        tp = next(tp for tp in (8, 4, 2, 1) if model.can_share(tp))
        layout = layout_of(model, GPUS[gpu], Layout(tp, 2, tp if model.num_experts else 1), "auto", "auto")
        source = RooflineSource(GPUS[gpu], dtype=layout.dtype)
        priced = Composed(model, gpu, layout, [source], source.efficiency)
        price = priced.run(shape, 1)[0].first / 16
        assert sum(priced.stages(shape)) == pytest.approx(price, rel=1e-4), name
        assert interval_of(priced.explain(shape))[0] * 1e9 == pytest.approx(price, rel=0.02), name


def test_speculation_and_pipelines_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"latency.speculation and replica.pp = 2 do not go together yet; use replica.pp = 1"):
        composed(Layout(pp=2), speculation=Speculation(2, 0.5))


@given(values=st.lists(st.floats(0, 10), min_size=40, max_size=40), sizes=st.lists(st.integers(1, 200), min_size=2))
def test_where_a_source_dips_the_price_stays(values: list[float], sizes: list[int]) -> None:
    surface = Surface(lambda size: [values[size % 40], values[(7 * size) % 40]])
    rows = [surface.row(size) for size in sorted(sizes)]
    assert all(first <= second for first, second in rows)
    for lower, higher in pairwise(rows):
        assert all(a <= b + 1e-12 for a, b in zip(lower, higher, strict=True))


def test_sizes_between_those_of_the_grid_lie_on_the_straight_line() -> None:
    surface = Surface(lambda size: [float(size)])
    assert [surface.row(size)[0] for size in (1, 16, 17, 100, 12345)] == pytest.approx([1, 16, 17, 100, 12345])
