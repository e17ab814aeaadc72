"""Fleets whose replicas are not alike: shapes, GPUs, pools and batching of each, worked out by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from squall.config import Config, ReplicaSpec, dumps, from_tree
from squall.core.metrics import Outcome
from squall.core.types import MILLISECOND, RequestId
from squall.errors import ConfigError
from squall.fleet_tables import Fleet
from squall.policies.batching import Sarathi, Vllm
from squall.policies.route import LeastLoaded, RoundRobin
from squall.pools import alike, refuse_pools
from squall.report.deployed import deployed
from squall.report.detail import detail, usage
from squall.report.run import write_run
from squall.report.steps import Stretches
from squall.sim.kinds import Kind, each
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse, usd_per_gpu_hour
from squall.workload.spec import OfferedRequest

MS = MILLISECOND
FAST = Linear(fixed=16 * MS)  # a millisecond a step
SLOW = Linear(fixed=64 * MS, shares=(1, 3))  # four, one of them at the first stage

TREE = {
    "model": {"name": "llama-3-8b"},
    "cluster": {"gpu": "a100-80g"},
    "batching": {"kind": "vllm", "max_num_batched_tokens": 1024},
    "fleet": {
        "pools": [
            {"replicas": 2, "num_blocks": 900},
            {"gpu": "h100-sxm", "tp": 2, "batching": {"max_num_seqs": 32}},
            {"usd_per_gpu_hour": 1.5, "batching": {"kind": "sarathi"}},
        ]
    },
}


def offered(id: RequestId, at_ms: float, prompt: int, output: int) -> OfferedRequest:
    return OfferedRequest(id, round(at_ms * MS), prompt, output)


def kind(latency: Linear, num_blocks: int, tp: int = 1, replicas: int = 1, seqs: int = 8) -> Kind:
    shape = ReplicaSpec(block_size=4, tp=tp, pp=latency.num_stages)
    return Kind(Config(replica=shape, batching=Vllm(seqs, 64), fleet=Fleet(replicas=replicas)), latency, num_blocks)


def test_each_replica_has_its_own_times_stages_pool_and_batching() -> None:
    kinds = [kind(FAST, 100, tp=4, seqs=1), kind(SLOW, 6)]
    config = Config(route=RoundRobin(), replica=ReplicaSpec(block_size=4), fleet=Fleet(pools=from_tree("", TREE).fleet.pools[1:]))
    observer = Observer(FAST, 4, {id: of.latency for id, of in enumerate(each(kinds))})
    log, created = watched([observer])
    requests = [
        offered(0, 0, prompt=10, output=4),  # to replica 0: a step a millisecond
        offered(1, 0, prompt=10, output=4),  # to replica 1: four milliseconds through both stages, each of four times
        offered(2, 1, prompt=10, output=2),  # to replica 0, which runs one request at a time
        offered(3, 2, prompt=40, output=2),  # in turn for replica 1, whose 24 tokens it does not fit into: to replica 0
    ]
    record = simulate(config, requests, FAST, 0, kinds=kinds, log=log, created=created)
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 4
    assert [row.replica for row in record.requests] == [0, 1, 0, 0]
    assert [row.scheduled_at // MS for row in record.requests] == [0, 0, 4, 6]
    assert [row.first_token_at // MS for row in record.requests] == [1, 4, 5, 7]
    assert [row.finished_at // MS for row in record.requests] == [4, 16, 6, 8]
    assert (record.ended_at, record.num_steps) == (16 * MS, 8 + 4)
    assert record.gpu_nanos == 16 * MS * (4 + 2)
    observed = observer.observed
    assert (observed.pools, observed.stages, observed.num_stages) == ({0: 100, 1: 6}, {0: 1, 1: 2}, 2)
    use = usage(record, observed, None)
    rows = list(zip(use.replica, use.stage, use.busy // MS, use.num_steps, strict=True))
    assert rows == [(0, 0, 8, 8), (1, 0, 4, 4), (1, 1, 12, 4)]
    found = detail(record, observed, use, None)
    assert found.busy_s == pytest.approx(0.024)
    assert found.step_s is not None
    assert found.step_s.mean == pytest.approx(0.002)  # eight of one, four of four
    assert found.step_s.max == 0.004
    assert sum(len(piece["stage"]) for piece in Stretches(observed).steps()) == 8 + 2 * 4


def test_a_request_that_fits_into_no_pool_is_refused_and_says_the_largest() -> None:
    kinds = [kind(FAST, 3), kind(FAST, 6)]
    fleet = Fleet(pools=from_tree("", TREE).fleet.pools[1:])
    config = Config(route=LeastLoaded(), replica=ReplicaSpec(block_size=4), fleet=fleet)
    record = simulate(config, [offered(0, 0, 30, 2), offered(1, 0, 20, 2)], FAST, 0, kinds=kinds)
    refused, served = record.requests
    assert (refused.outcome, served.outcome, served.replica) == (Outcome.REJECTED, Outcome.COMPLETED, 1)


def test_pools_are_configurations_of_their_own() -> None:
    config = from_tree("a.toml", TREE)
    first, second, third = alike(config)
    assert config.fleet.num_initial == 4
    assert [part.fleet.num_initial for part in (first, second, third)] == [2, 1, 1]
    assert [part.cluster.gpu for part in (first, second, third)] == ["a100-80g", "h100-sxm", "a100-80g"]
    assert (first.replica.num_blocks, second.replica.num_blocks, second.replica.tp) == (900, None, 2)
    assert first.batching == Vllm(max_num_batched_tokens=1024)
    assert second.batching == Vllm(max_num_seqs=32, max_num_batched_tokens=1024)
    assert third.batching == Sarathi()
    assert alike(first) == [first]


def test_the_resolved_configuration_says_the_same(tmp_path: Path) -> None:
    from squall.config import load

    config = from_tree("a.toml", TREE)
    (tmp_path / "again.toml").write_text(dumps(config))
    assert load(tmp_path / "again.toml") == config


def test_what_each_pool_held_and_cost_is_told(tmp_path: Path) -> None:
    tree = {
        **TREE,
        "latency": {"kind": "roofline"},
        "run": {"detail": True, "series_s": 0.5},
        "workload": {
            "kind": "synthetic",
            "arrivals": {"kind": "fixed", "rate_rps": 100},
            "prompt": {"kind": "fixed", "tokens": 200},
            "output": {"kind": "fixed", "tokens": 20},
            "num_requests": 20,
        },
    }
    config = from_tree("a.toml", tree)
    record = rehearse(config)
    summary = write_run(tmp_path / "run", record, config, usd_per_gpu_hour(config), on=deployed(config))
    assert [(pool.gpu, pool.replicas, pool.num_gpus) for pool in summary.pools] == [
        ("a100-80g", 2, 2), ("h100-sxm", 1, 2), ("a100-80g", 1, 1),
    ]  # fmt: skip
    assert [pool.gpu_seconds for pool in summary.pools] == pytest.approx([summary.makespan_s * n for n in (2, 2, 1)])
    assert summary.pools[2].cost_usd == pytest.approx(summary.makespan_s / 3600 * 1.5)
    assert summary.gpu_seconds == pytest.approx(5 * summary.makespan_s)
    assert summary.cost_usd == pytest.approx(sum(pool.cost_usd or 0 for pool in summary.pools))
    assert {row.replica for row in record.requests} == {0, 1, 2, 3}
    assert summary.detail is not None
    assert summary.detail.mfu is not None
    assert summary.energy_j is not None
    assert summary.energy_j > 0


WRONG: Sequence[tuple[dict[str, object], str]] = [
    ({"replicas": 2, "pools": [{}]}, "fleet.replicas and [[fleet.pools]] both say"),
    ({"mode": "disaggregated", "pools": [{}]}, "replicas that are not alike are colocated ones"),
    ({"pools": [{"tp": 0}]}, "fleet.pools[0].tp"),
    ({"pools": [{"batching": {"max_num_seq": 1}}]}, "max_num_seq"),
]


@pytest.mark.parametrize(("fleet", "said"), WRONG)
def test_what_cannot_be_meant_is_named(fleet: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_tree("a.toml", {"fleet": fleet})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pool_that_does_not_fit_is_named_by_its_number() -> None:
    workload = {"kind": "synthetic", "arrivals": {"kind": "all_at_once"}, "num_requests": 1,
                "prompt": {"kind": "fixed", "tokens": 1}, "output": {"kind": "fixed", "tokens": 1}}  # fmt: skip
    config = from_tree("", {"model": {"name": "llama-3-70b"}, "workload": workload,
                            "fleet": {"pools": [{"gpu": "h100-sxm", "tp": 4}, {"gpu": "h100-sxm"}]}})  # fmt: skip
    with pytest.raises(ConfigError, match=r"\[\[fleet.pools\]\] number 2: "):
        rehearse(config)
    with pytest.raises(ConfigError, match=r"squall serve wants replicas that are alike"):
        refuse_pools(config, "squall serve")


def test_a_fault_without_an_end_is_written_too(tmp_path: Path) -> None:
    """A table in a list, with a key that is not set."""
    from squall.config import load

    config = from_tree("a.toml", {"faults": [{"at_s": 1, "kind": "replica", "which": 0}]})
    (tmp_path / "again.toml").write_text(dumps(config))
    assert load(tmp_path / "again.toml") == config
