"""Several models on one simulated cluster: GPUs go round, links are shared, nodes fall for all; each log tells its own story."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from squall import config as configuration
from squall.config import Config
from squall.core.actions import StartReplica
from squall.core.events import GpusHeld, NodeDown, ReplicaLost, ReplicaStopped, Warmed
from squall.core.metrics import Outcome, RunRecord
from squall.core.types import FOREVER, SECOND, MachineId, Nanos
from squall.errors import ModelError, SquallError
from squall.eventlog import Record, read
from squall.report.cluster import GPUS, read_cluster, write_cluster_report
from squall.sharing import shares
from squall.sim import together
from squall.sim.run import Body, simulate
from squall.twin.observe import observe
from squall.twin.rehearse import parts_of
from squall.twin.together import rehearse_together, simulate_together
from tests.live.disks import small_disk

FILES = ["chat.toml", "code.toml"]
SMALL = ("model.name=llama-3-8b", "cluster.gpu=a100-80g", "cluster.gpus_per_node=4", "fleet.replicas={min=1, max=4}",
         "fleet.down_window_s=2")  # fmt: skip


def steady(rate: float, num_requests: int, tokens: int = 100) -> str:
    return (
        f"workload={{kind='synthetic', num_requests={num_requests}, arrivals={{kind='fixed', rate_rps={rate}}}, "
        f"prompt={{kind='fixed', tokens={tokens}}}, output={{kind='fixed', tokens=20}}}}"
    )


def schedule(*steps: tuple[float, int]) -> str:
    listed = ", ".join(f"{{at_s={at}, replicas={count}}}" for at, count in steps)
    return f"scale={{kind='schedule', steps=[{listed}]}}"


def pair(chat: Sequence[str], code: Sequence[str], base: Sequence[str] = SMALL) -> list[Config]:
    return [
        configuration.load(None, [*base, "model.served_as=['chat']", *chat]),
        configuration.load(None, [*base, "model.served_as=['code']", *code]),
    ]


class Lines:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[Record] = []

    def created(self, *_: object) -> None: ...

    def record(self, now: Nanos, machine: MachineId, event: object, actions: Sequence[object]) -> None:
        self.lines.append(Record(now, machine, event, actions))  # type: ignore[arg-type]

    def at(self, kind: type) -> list[Nanos]:
        return [line.now for line in self.lines if isinstance(line.event, kind)]

    def started(self) -> list[Nanos]:
        return [line.now for line in self.lines for action in line.actions if isinstance(action, StartReplica)]


def play(configs: Sequence[Config]) -> tuple[list[RunRecord], list[Lines]]:
    lines = [Lines() for _ in configs]
    return rehearse_together(configs, FILES[: len(configs)], [[each] for each in lines]), lines


def check_budget(records: Sequence[RunRecord], num_gpus: int) -> None:
    """At no instant are there more, and what is billed is what was held."""
    changes = sorted((level.at, number, level.held) for number, record in enumerate(records) for level in _levels(record))
    held = [0] * len(records)
    for index, (at, number, count) in enumerate(changes):
        held[number] = count
        if index + 1 == len(changes) or changes[index + 1][0] > at:  # within an instant one gives and the other takes
            assert sum(held) <= num_gpus
    for record in records:
        ends = [*(level.at for level in _levels(record)[1:]), record.ended_at]
        assert sum(level.held * (end - level.at) for level, end in zip(_levels(record), ends, strict=True)) == record.gpu_nanos


def _levels(record: RunRecord):  # type: ignore[no-untyped-def]
    assert record.fleet is not None
    return record.fleet.gpus


def test_gpus_that_one_fleet_gives_back_are_taken_at_that_instant_by_the_one_that_waits() -> None:
    """chat has three of four GPUs until 20 s; code has wanted three since 10 s."""
    configs = pair([schedule((0, 3), (20, 1)), steady(1, 40)], [schedule((10, 3)), steady(1, 40), "fleet.up_interval_s=30"])
    records, (chat, code) = play(configs)
    check_budget(records, 4)
    [stopped] = set(chat.at(ReplicaStopped))
    assert stopped >= 20 * SECOND
    assert [at for at in code.started() if at] == [stopped, stopped]
    [waited] = [level for level in _levels(records[1]) if level.awaited]
    assert (waited.at, waited.held, waited.awaited) == (10 * SECOND, 1, 2)
    assert all(row.outcome is Outcome.COMPLETED for record in records for row in record.requests)


def test_bursts_that_alternate_need_fewer_gpus_than_two_clusters(tmp_path: Path) -> None:
    def workload(rates: str) -> str:
        lengths = "prompt={kind='fixed', tokens=500}, output={kind='fixed', tokens=60}"
        arrivals = f"arrivals={{kind='mmpp', rates_rps=[{rates}], mean_stay_s=[8, 8]}}"
        return f"workload={{kind='synthetic', duration_s=40, {arrivals}, {lengths}}}"

    scale = "scale.kind=concurrency"
    configs = pair([workload("1, 40"), scale], [workload("40, 1"), scale])
    summary, each = simulate_together(configs, FILES, tmp_path / "run", events=True)
    assert [fleet.model for fleet in summary.fleets] == ["chat", "code"]
    assert all(fleet.gpus_max >= 2 for fleet in summary.fleets)
    assert summary.gpu_seconds == pytest.approx(sum(one.gpu_seconds for one in each))
    assert summary.cost_usd == pytest.approx(sum(one.cost_usd or 0 for one in each))
    assert 0 < summary.used <= 1
    assert read_cluster(tmp_path / "run") == summary
    for fleet in summary.fleets:
        records = list(read(tmp_path / "run" / fleet.model / "events.jsonl.zst"))
        assert any(isinstance(record.event, GpusHeld) for record in records)
        found = observe(records)
        assert found.exact, str(found.mismatches[0])
    assert (tmp_path / "run" / GPUS).is_file()
    page = write_cluster_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "GPUs that each model has" in page


def test_what_is_wrong_with_one_is_said_of_its_file() -> None:
    with pytest.raises(ModelError, match=r"^code.toml: model.name 'nobodys' is neither a known model"):
        play(pair([steady(1, 5)], [steady(1, 5), "model.name=nobodys"]))


def test_a_full_disk_is_said_of_the_run_directory_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mmap.PAGESIZE) as disk:
        with pytest.raises(SquallError, match=rf"^cannot write the run directory {disk}/run: No space left on device$"):
            simulate_together(pair([steady(1, 5)], [steady(1, 5)]), FILES, disk / "run")
        assert not list(disk.iterdir())


def test_a_fleet_whose_neighbour_does_nothing_runs_as_it_would_alone() -> None:
    settings = (steady(20, 400, tokens=900), "scale.kind=concurrency", "load.kind=p2p", "hazards.replica_per_hour=200")
    idle = ("fleet.replicas={min=0, max=4, initial=0}", steady(1, 1), "hazards.replica_per_hour=0")
    busy, other = pair(settings, idle)
    found = shares([busy, other], FILES)
    [part, beside] = [parts_of(config, (), share) for config, share in zip((busy, other), found, strict=True)]
    alone = simulate(busy, part.requests, part.latency, part.num_blocks, ground=parts_of(busy).ground)
    wires = part.ground.wires()
    bodies = [
        Body(busy, part.requests, part.latency, part.num_blocks, ground=part.ground, wires=wires),
        Body(other, [], beside.latency, beside.num_blocks, ground=beside.ground, wires=wires),
    ]
    together.join(bodies)
    together.run(bodies)
    record = bodies[0].record()
    assert record.requests == alone.requests
    assert record.gaps == alone.gaps
    assert (record.scale_ups, record.num_steps, record.ended_at) == (alone.scale_ups, alone.num_steps, alone.ended_at)
    assert record.gpu_nanos == alone.gpu_nanos
    assert alone.scale_ups >= 1


def test_loads_of_two_models_over_one_link_take_twice_as_long() -> None:
    """Each has one of the two GPUs of a node that has one NIC, and gets its second replica on the other node."""
    base = (
        "model.name=llama-3-8b", "cluster.gpu=a40", "cluster.gpus_per_node=2", "cluster.nodes=2", "cluster.nic_gbps=10",
        "fleet.replicas={min=1, max=2}", "load.kind=p2p", schedule((5, 2)), steady(0.1, 10),
    )  # fmt: skip
    _, (chat, code) = play(pair([], [], base))
    together_s = [(lines.at(Warmed)[-1] - lines.started()[-1]) / SECOND for lines in (chat, code)]
    _, (chat, code) = play(pair([], [schedule((500, 2))], base))
    alone_s = (chat.at(Warmed)[-1] - chat.started()[-1]) / SECOND
    assert alone_s > 5
    assert together_s == [pytest.approx(2 * alone_s, rel=1e-3)] * 2


def test_a_node_that_goes_takes_replicas_of_both_and_both_come_back_elsewhere() -> None:
    base = (*SMALL, "cluster.nodes=2", "cluster.gpus_per_node=2", steady(1, 60))
    fault = "faults=[{at_s=10, kind='node', which=0, duration_s=20}]"
    records, each = play(pair([fault], [fault], base))  # said by both, and happens once
    check_budget(records, 4)
    for lines, record in zip(each, records, strict=True):
        assert lines.at(NodeDown) == [10 * SECOND]
        assert lines.at(ReplicaLost) == [10 * SECOND]
        assert [at for at in lines.started() if at] == [10 * SECOND]
        assert all(row.outcome is Outcome.COMPLETED for row in record.requests)


def test_a_replicas_fault_is_its_own_fleets() -> None:
    records, (chat, code) = play(pair(["faults=[{at_s=5, kind='replica', which=0}]", steady(1, 20)], [steady(1, 20)]))
    assert chat.at(ReplicaLost) == [5 * SECOND]
    assert code.at(ReplicaLost) == []
    check_budget(records, 4)


def test_a_run_of_fixed_length_ends_for_all_at_that_instant() -> None:
    records, _ = play(pair([steady(1, 100), "run.duration_s=20"], [steady(1, 5), "run.duration_s=20"]))
    assert [record.ended_at for record in records] == [20 * SECOND] * 2
    assert [len(record.requests) for record in records] == [20, 5]


def test_it_is_the_same_every_time() -> None:
    def once() -> list[list[Record]]:
        _, each = play(pair([steady(30, 300, 900), "scale.kind=concurrency"], [steady(25, 300, 900), "scale.kind=concurrency"]))
        return [lines.lines for lines in each]

    assert once() == once()


def test_runs_of_many_steps_are_single_steps_for_all() -> None:
    configs = pair([steady(4, 60, 900), schedule((3, 3), (8, 1))], [steady(3, 60, 900), schedule((5, 3))])

    def once(max_steps: int) -> list[RunRecord]:
        parts = [parts_of(config, (), share) for config, share in zip(configs, shares(configs, FILES), strict=True)]
        wires = parts[0].ground.wires()
        bodies = [
            Body(config, part.requests, part.latency, part.num_blocks, ground=part.ground, wires=wires, max_steps=max_steps)
            for config, part in zip(configs, parts, strict=True)
        ]
        together.join(bodies)
        together.run(bodies)
        return [body.record() for body in bodies]

    for many, single in zip(once(FOREVER), once(1), strict=True):
        assert many.requests == single.requests
        assert many.num_steps == single.num_steps
        assert many.fleet == single.fleet
        assert many.num_events < single.num_events
