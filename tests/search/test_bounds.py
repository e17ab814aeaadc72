"""No schedule beats the bounds: replicas that never lack work do not serve more."""

import pytest
from msgspec.structs import replace

from squall.core.types import MILLISECOND, SECOND
from squall.search import bounds
from squall.search.sample import sample_of
from squall.search.spec import Limit
from squall.sim.run import simulate
from tests.search.conftest import setting


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
    assert 0 < bounds.busy(found.latency, room, hashed) < bounds.busy(found.latency, room, found.sample)
