"""No schedule beats the bounds: replicas that never lack work do not serve more."""

from typing import Any

import pytest
from msgspec.structs import replace

from squall.core.types import MILLISECOND, SECOND
from squall.perf.latency import BatchShape, Progression, only_stage
from squall.search import bounds
from squall.search.sample import sample_of
from squall.search.setting import Workshop
from squall.search.spec import Limit
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest
from tests.search.conftest import job, question, setting, tree


@pytest.mark.parametrize("gpu", ["a100-80g", "h100-sxm"])
@pytest.mark.parametrize(("tp", "seqs", "tokens"), [(1, 4, 512), (1, 256, 512), (2, 256, 8192)])
def test_a_saturated_replica_stays_below_its_bound(gpu: str, tp: int, seqs: int, tokens: int) -> None:
    found = setting({
        "cluster.gpu": gpu, "replica.tp": tp, "batching.max_num_seqs": seqs, "batching.max_num_batched_tokens": tokens,
    })  # fmt: skip
    record = simulate(found.config, found.sample.at(1e6), found.latency, found.num_blocks)
    reached = len(record.requests) * SECOND / record.ended_at
    assert reached <= found.highest_rps * (1 + 1e-6)
    assert reached > 0.3 * found.highest_rps  # and the bound is worth something


def test_a_small_pool_bounds_the_batch() -> None:
    found = setting({"replica.num_blocks": 300, "batching.max_num_seqs": 256})
    roomy = setting({"batching.max_num_seqs": 256})
    assert found.highest_rps < roomy.highest_rps
    record = simulate(found.config, found.sample.at(1e6), found.latency, found.num_blocks)
    assert len(record.requests) * SECOND / record.ended_at <= found.highest_rps


@pytest.mark.parametrize(
    "tables",
    [
        {"replica.pp": 2},
        {"batching.kind": "sarathi", "batching.chunk_size": 256},
        {"batching.kind": "orca", "batching.max_num_seqs": 16},
        {"batching.kind": "vllm_v0", "batching.max_num_batched_tokens": 512},
        {"batching.kind": "vllm_v0", "replica.pp": 2, "batching.max_num_seqs": 32},
        {"batching.kind": "lightllm", "batching.max_num_seqs": 64},
        {"batching.kind": "blitz", "replica.pp": 4},
        {"batching.kind": "orca", "replica.pp": 2, "batching.max_num_seqs": 16},
        {"batching.kind": "sarathi", "replica.pp": 4, "batching.max_num_seqs": 64},
        {"latency.speculation": {"draft_tokens": 4, "acceptance": 0.8}},
        {"latency.speculation": {"draft_tokens": 2, "acceptance": 0.3, "model": "smollm2-135m-instruct"}},
        {"model.name": "mixtral-8x7b", "cluster.gpu": "h100-sxm", "replica.tp": 2},
        {"model.name": "qwen3-30b-a3b", "cluster.gpu": "h100-sxm", "replica.tp": 2, "replica.ep": 2},
        {"model.name": "gemma-2-9b", "batching.max_num_seqs": 32},
    ],
)
def test_whatever_the_prices_look_like(tables: dict[str, Any]) -> None:
    """Pipelines, drafts that are checked, experts that a step's tokens share, windows of attention."""
    base = tree() if "batching.kind" not in tables else tree(batching={"kind": tables["batching.kind"]})
    found = Workshop(question()).setting(job(tables, base))
    record = simulate(found.config, found.sample.at(1e6), found.latency, found.num_blocks)
    reached = len(record.requests) * SECOND / record.ended_at
    assert 0.15 * found.highest_rps < reached <= found.highest_rps * (1 + 1e-6)


class Dipping:
    """Steps of 200 tokens and more cost no more than those of 200, as a table may say that knows a better kernel there."""

    source, num_stages = "test", 1

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        tokens = shape.num_decodes + sum(chunk.num_tokens for chunk in shape.chunks)
        return [Progression(steps, 16 * min(tokens, 200) * 1000 + 16 * shape.decode_context, 16 * shape.num_decodes)]

    def stages(self, shape: BatchShape) -> tuple[int, ...]:
        return only_stage(self.run(shape, 1))


def test_the_least_price_is_that_of_the_cheapest_size() -> None:
    least = bounds.Prices(Dipping()).least(bounds.Room(400, 100, 10_000))
    assert least == bounds.Least(token=(200 * 1000 / 400,), decode=(1000.0,), step=(1000.0,), context=(1.0,))


def test_prompts_apart_from_decodes_take_their_own_time() -> None:
    """Both in one step share a token's price; apart, prompts are computed first and decodes after them."""
    found, least = setting(), bounds.Least(token=(10.0,), decode=(20.0,), step=(50.0,), context=(0.0,))
    prompts, decodes = found.sample.num_prompt_tokens, found.sample.num_gaps
    together, apart = (bounds.Room(512, 64, 1 << 40, apart) for apart in (False, True))
    assert bounds.busy(least, together, found.sample) == max(10 * (prompts + decodes), 20 * decodes)
    assert bounds.busy(least, apart, found.sample) == 10 * prompts + 20 * decodes


def test_a_stage_has_its_share_of_the_seats() -> None:
    config = setting({"batching.max_num_seqs": 64}).config
    assert bounds.room(config.batching, 100_000, 4).seqs == 64  # vLLM's may all be in one batch
    v0 = Workshop(question()).setting(job({"batching.kind": "vllm_v0"}, tree(batching={"kind": "vllm_v0"}))).config
    assert (bounds.room(v0.batching, 100_000, 4).seqs, bounds.room(v0.batching, 100_000).seqs) == (64, 256)


def test_replicas_multiply_it() -> None:
    assert setting({"fleet.replicas": 3}).highest_rps == pytest.approx(3 * setting().highest_rps)


def test_what_no_request_can_keep_is_known_without_a_simulation() -> None:
    found = setting()
    hopeless = [Limit("tbt", 0.99, MILLISECOND // 10), Limit("ttft", 0.9, MILLISECOND)]
    assert bounds.impossible(found.latency, found.sample, 6, hopeless[:1]) == "tbt_p99"
    assert bounds.impossible(found.latency, found.sample, 6, hopeless[1:]) == "ttft_p90"
    assert bounds.impossible(found.latency, found.sample, 6, found.limits) == ""


def test_prompts_that_may_be_cached_cost_nothing_for_certain() -> None:
    found = setting()
    hashed = sample_of([replace(request, block_hashes=(1,)) for request in found.sample.requests])
    room = bounds.room(found.config.batching, 100_000)
    least = bounds.Prices(found.latency).least(room)
    assert 0 < bounds.busy(least, room, hashed) < bounds.busy(least, room, found.sample)


def test_a_prefix_that_many_share_lies_in_the_pool_once() -> None:
    """One request fills two thirds of this pool with its prompt alone, and sixty that share it decode together."""
    found = setting({"replica.num_blocks": 400, "batching.max_num_seqs": 64})
    alike = sample_of([OfferedRequest(id, 1000 * (id + 1), 4112, 64, tuple(range(1, 257))) for id in range(64)])
    apart = sample_of([replace(request, block_hashes=()) for request in alike.requests])
    room = bounds.room(found.config.batching, 400 * 16)
    least = bounds.Prices(found.latency).least(room)
    for sample, more in ((alike, 5.0), (apart, 0.0)):
        record = simulate(found.config, sample.at(1e6), found.latency, 400)
        reached = len(record.requests) * SECOND / record.ended_at
        assert more < reached <= bounds.highest_rate(least, room, sample, 1)
