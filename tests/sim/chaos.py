"""Runs at random in which anything may break at any time, and what has to hold in all of them whatever that was.

A case is told by its seed alone: fleet, policies, workload, faults, cancellations, scale events. Knows no machine's insides but
the counts of what it holds.

    python -m tests.sim.chaos --events 10000

plays cases of all kinds until so many replicas were wanted, or not any more, and names those in which something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from squall.config import Cluster, Config, Model
from squall.core.actions import AnyAction, StartReplica
from squall.core.controller import Controller
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import AnyEvent, HandedOver, NodeDown, NodeUp, ReplicaLost, ReplicaStopped
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.handoff_router import HandoffRouter
from squall.core.lifecycle import Phase
from squall.core.machine import Machine
from squall.core.metrics import Outcome, RunRecord
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import CONTROLLER, FOREVER, MILLISECOND, ROUTER, SECOND, MachineId, Nanos, ReplicaId, RequestId, Role
from squall.eventlog import Created, open_log, read
from squall.fleet_tables import Fault, Fleet, Handoff, Hazards, Replicas, Startup
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import LatencyModel
from squall.policies.batching import BlitzBatching, LightLlm, Orca, Sarathi, Vllm, VllmV0
from squall.policies.load import Auto, Chain, Disk, Host, P2p, Striped
from squall.sim.ground import Ground, Wires, ground
from squall.sim.loading import Roads
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.twin.observe import observe, rebuild
from squall.workload.spec import OfferedRequest

SECONDS = 6
"""In which requests arrive and things break."""
LAST = 400 * SECOND
"""When one more request comes: by then everything else is over, so the fleet must serve it and hold nothing else."""
Log = list[tuple[Nanos, MachineId, AnyEvent, Sequence[AnyAction]]]


class Wishes(Struct, frozen=True, tag_field="kind", tag="wishes"):
    """Numbers of replicas that somebody wants from so many milliseconds on."""

    steps: tuple[tuple[int, Role, int], ...]

    def __call__(self, view: ScaleView) -> Wanted:
        return Wanted({role: count for at, role, count in self.steps if at * MILLISECOND <= view.now}, "wished")


class Case(Struct, frozen=True):
    """What one seed stands for."""

    config: Config
    requests: Sequence[OfferedRequest]
    cancellations: Sequence[tuple[Nanos, RequestId]]
    num_blocks: int


class Played(Struct):
    """How a case went."""

    record: RunRecord
    log: Log
    machines: dict[MachineId, Machine]
    ground: Seen


class Seen(Ground, frozen=True):
    """A ground whose roads can be looked at."""

    made: list[Roads] = field(default_factory=list)

    def roads(self, wires: Wires) -> Roads | None:
        found = Ground.roads(self, wires)
        if found is not None:
            self.made.append(found)
        return found


def case(seed: int, mode: str, *, live: bool, seconds: int = SECONDS, drain: Literal["wait", "move"] = "wait") -> Case:
    rng = Random(f"chaos {seed} {mode} {live}")
    roles = [Role.BOTH] if mode == "colocated" else [Role.PREFILL, Role.DECODE]
    batching: list[Any] = [Vllm(64, 2048, False), Vllm(32, 512), Sarathi(64, 256), LightLlm(64, 2048), VllmV0(64, 2048)]
    if mode == "colocated":
        batching += [BlitzBatching(2048, 16_000), Orca(16)]
    loads: list[Any] = [Chain(live=live), P2p(live=live), Striped(live=live), Auto(live=live), Disk(live=live), Host(live=live)]
    some = Replicas(1, 3, rng.randint(1, 2))
    damping = {"up_interval_s": 0.05, "down_window_s": rng.choice([0.2, 2.0]), "idle_ttl_s": 0.2, "start_timeout_s": 60.0}
    if mode == "colocated":
        fleet = Fleet(replicas=Replicas(1, 5, rng.randint(1, 2)), drain=drain, **damping)  # type: ignore[arg-type]
    else:
        fleet = Fleet("disaggregated", prefill=some, decode=some, drain=drain, **damping)  # type: ignore[arg-type]
    wishes = [
        (rng.randrange(1000 * seconds), rng.choice(roles), rng.randint(1, 5))
        for _ in range(rng.randint(3, 12) * seconds // SECONDS)
    ]
    wishes += [(0, role, 1) for role in roles]
    config = Config(
        model=Model("meta-llama/Llama-3.1-8B"),
        cluster=Cluster("h100-sxm", rng.choice([6, 8]), 1, nic_gbps=rng.choice([100, 400])),
        fleet=fleet,
        scale=Wishes(tuple(sorted(wishes, key=lambda wish: wish[0]))),  # type: ignore[arg-type]
        load=rng.choice(loads),
        batching=rng.choice(batching),
        handoff=Handoff(rng.choice([None, None, 0.02]), max_share=rng.choice([1.0, 3.0])),
        faults=tuple(_fault(rng, seconds) for _ in range(rng.randint(0, 5) * seconds // SECONDS)),
        startup=Startup(capture_s=rng.choice([0.0, 0.3]), process_s=rng.choice([0.0, 0.2]), stop_s=rng.choice([0.0, 0.1])),
    )
    config = replace(config, queue=replace(config.queue, max_retries=rng.choice([1, 3, 20])))
    requests = _requests(rng, seconds)
    gone = [(request.arrived_at + rng.randrange(2 * SECOND), request.id) for request in requests if rng.random() < 0.1]
    requests.append(OfferedRequest(len(requests), LAST + seconds * SECOND, 500, 3))
    return Case(config, requests, gone, rng.choice([420, 1000, 6000]))


def _requests(rng: Random, seconds: int) -> list[OfferedRequest]:
    """Bursts, and prompts of which some begin alike."""
    times = sorted(rng.randrange(seconds * SECOND) for _ in range(rng.randint(20, 80) * seconds // SECONDS))
    found: list[OfferedRequest] = []
    for id, at in enumerate(times):
        prompt = rng.randint(50, 3500)
        family = rng.randrange(4)
        shared = min(rng.choice([0, 40]), prompt // 16)
        hashes = tuple(1000 * family + i for i in range(shared)) + tuple(
            10_000 + 1000 * id + i for i in range(prompt // 16 - shared)
        )
        found.append(OfferedRequest(id, at, prompt, rng.choice([1, 1, 2, 16, 64, 200]), hashes))
    return found


def by_chance(of: Case, seed: int) -> Case:
    """The same case with hazards in place of its faults, few enough for a fleet to come up between them."""
    rng = Random(f"chance {seed}")
    some = [0, 30, 100]
    hazards = Hazards(
        replica_per_hour=rng.choice(some), node_per_hour=rng.choice(some), node_back_s=2.0, notice_s=rng.choice([0.0, 1.0]),
        link_lost_per_hour=rng.choice(some), link_lost_s=2.0, link_per_hour=rng.choice(some), link_factor=rng.choice([0.5, 0.1]),
        slow_per_hour=rng.choice(some), slow_s=2.0, slow_factor=rng.choice([0.5, 0.01]),
    )  # fmt: skip
    return replace(of, config=replace(of.config, faults=(), hazards=hazards, run=replace(of.config.run, seed=seed)))


def _fault(rng: Random, seconds: int) -> Fault:
    at, which = rng.randrange(1000 * seconds) / 1000, rng.randrange(6)
    while_ = rng.choice([0.2, 1.0, 5.0])
    return rng.choice([
        Fault(at, "replica", which),
        Fault(at, "replica", which),
        Fault(at, "node", which, while_, rng.choice([0.0, 0.0, 0.5, 2.0])),
        Fault(at, "slow", which, rng.choice([None, while_]), factor=rng.choice([0.5, 0.1])),
        Fault(at, "link", which, rng.choice([None, while_]), factor=rng.choice([0.3, 0.01])),
        Fault(at, "link", which, while_, factor=1e-12),
        Fault(at, "link", 1, factor=1e-12),
    ])  # fmt: skip


class TooMany(Exception):
    """The run does not come to an end."""


def play(of: Case, max_steps: int = FOREVER, path: Path | None = None, most: int = 1_000_000) -> Played:
    """Play it; a log of it is left at `path`."""
    config = of.config
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    latency = _latency()
    on = ground(config, model, gpu, latency, of.num_blocks)
    seen = Seen(on.plan, on.delays, on.links, on.fabric, on.shard, on.num_gpus, on.kv, on.kv_delay)
    log: Log = []
    machines: dict[MachineId, Machine] = {}

    def note(*entry: Any) -> None:
        if len(log) == most:
            raise TooMany(f"{most} events, and still there is something at {entry[0] / SECOND} s: {entry[1:3]}")
        log.append(entry)

    def created(_now: Nanos, id: MachineId, machine: Machine) -> None:
        machines[id] = machine

    if path is None:
        record = simulate(
            config, of.requests, latency, of.num_blocks, ground=seen, log=note, max_steps=max_steps,
            cancellations=of.cancellations, created=created,
        )  # fmt: skip
        return Played(record, log, machines, seen)
    with open_log(path) as written:

        def both(now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
            note(now, id, event, actions)
            written.record(now, id, event, actions)

        def made(now: Nanos, id: MachineId, machine: Machine) -> None:
            created(now, id, machine)
            written.created(now, id, machine)

        record = simulate(
            config, of.requests, latency, of.num_blocks, ground=seen, log=both, max_steps=max_steps,
            cancellations=of.cancellations, created=made,
        )  # fmt: skip
    return Played(record, log, machines, seen)


@cache
def _latency() -> LatencyModel:
    config = Config(model=Model("meta-llama/Llama-3.1-8B"), cluster=Cluster("h100-sxm", 1, 1))
    return prepare(config, resolve_model(config.model.name), resolve_gpu("h100-sxm"))[0]


# -- what has to hold


def check(of: Case, played: Played) -> None:
    check_ends(of, played.record)
    check_budget(of, played)
    check_nothing_is_held(of, played)


def check_ends(of: Case, record: RunRecord) -> None:
    """Everybody ends, once, and no token is lost or made twice."""
    assert [row.id for row in record.requests] == [request.id for request in of.requests]
    for request, row in zip(of.requests, record.requests, strict=True):
        assert row.outcome is not Outcome.UNFINISHED, row
        if row.outcome is Outcome.COMPLETED:
            assert row.num_output_tokens == request.num_output_tokens, row
        assert row.num_output_tokens <= request.num_output_tokens, row
    gaps = sum(max(0, row.num_output_tokens - 1) for row in record.requests)
    assert sum(weight * count for weight, count in zip(record.gaps.weight, record.gaps.count, strict=True)) == gaps
    cut_off = any(fault.kind == "link" and fault.duration_s is None and fault.factor < 0.01 for fault in of.config.faults)
    goes_on = of.config.hazards.may_strike  # also in the last one's time, and it may lose its replica once too often
    assert cut_off or goes_on or record.requests[-1].outcome is Outcome.COMPLETED


def check_budget(of: Case, played: Played) -> None:
    """No slot is used twice at a time, none on a node that is away, and never more than there are."""
    slots = played.ground.plan.slots
    used: set[ReplicaId] = set()
    away: set[int] = set()
    for now, _, event, actions in played.log:
        match event:
            case ReplicaLost(replica) | ReplicaStopped(replica):
                used.discard(replica)
            case NodeDown(node, at) if at <= now:
                away.add(node)
            case NodeUp(node):
                away.discard(node)
        for action in actions:
            if isinstance(action, StartReplica):
                assert action.replica not in used
                assert not away.intersection(slots.nodes(action.replica))
                used.add(action.replica)
        assert len(used) <= slots.num


def check_nothing_is_held(of: Case, played: Played) -> None:
    """Blocks, activations, hand-offs, flows of KV, and the router's counts, when only the last request was there for long."""
    lost = {id for id in played.machines if id >= 0} - _alive(played.log)
    controller = played.machines[CONTROLLER]
    assert isinstance(controller, Controller)
    loads = any(member.phase in (Phase.LOADING, Phase.WARMING) for member in controller.fleet.values())
    for id, machine in played.machines.items():
        if isinstance(machine, Replica) and id not in lost:
            assert machine.num_used_blocks == 0, id
            assert (machine.num_running, machine.num_waiting) == (0, 0), id
            assert machine.handoffs is None or (machine.handoffs.num_held, machine.handoffs.num_expected) == (0, 0), id
            assert machine.live is None or loads, f"replica {id} is in a pair that has ended"
    router = played.machines[ROUTER]
    assert isinstance(router, Router)
    assert (router.num_queued, router.num_outstanding) == (0, 0)
    for role in [Role.BOTH] if of.config.fleet.mode == "colocated" else [Role.PREFILL, Role.DECODE]:
        demand = router.demand(role)
        assert (demand.num_queued, demand.num_queued_tokens, demand.num_waiting, demand.num_waiting_tokens) == (0, 0, 0, 0)
        assert (demand.num_running, demand.num_promised_tokens) == (0, 0)
    assert isinstance(router, DisaggregatedRouter) == (of.config.fleet.mode == "disaggregated")
    assert isinstance(router, HandoffRouter) == (of.config.fleet.mode == "disaggregated" or of.config.fleet.drain == "move")
    for roads in played.ground.made:
        assert not [flow for flow in roads.network._flows if flow < 0], "KV is still on its way"


def _alive(log: Log) -> set[ReplicaId]:
    alive: set[ReplicaId] = set()
    for *_, event, actions in log:
        if isinstance(event, ReplicaLost | ReplicaStopped):
            alive.discard(event.replica)
        alive |= {action.replica for action in actions if isinstance(action, StartReplica)}
    return alive


def check_replay(of: Case, played: Played, path: Path) -> None:
    """The log, fed to fresh machines, gives every action."""
    plan = played.ground.plan

    def make(created: Created) -> Machine:
        if created.kind == "Controller":
            return Controller(plan, of.config.scale, of.config.load)
        return rebuild(created)

    observation = observe(read(path), make)
    assert observation.exact, "\n".join(map(str, observation.mismatches))
    assert sum(observation.num_events.values()) == len(played.log)


# -- by the thousand


class Tally(Struct):
    """What came of many cases; `broken` names those in which something does not hold: their seed, their kind, and what."""

    events: int = 0
    runs: int = 0
    requests: int = 0
    lost: int = 0
    handed: int = 0
    broken: list[str] = field(default_factory=list)


def kinds() -> Iterator[tuple[str, bool]]:
    """All kinds of cases, over and over."""
    while True:
        yield from ((mode, live) for mode in ("colocated", "disaggregated") for live in (True, False))


def tally(num_events: int, first_seed: int, seconds: int) -> Tally:
    """Cases of so many seconds, of all kinds in turn, until so many scale events were seen."""
    found = Tally()
    for number, (mode, live) in enumerate(kinds()):
        if found.events >= num_events:
            return found
        seed = first_seed + number // 4
        drain: Literal["wait", "move"] = "move" if seed % 2 else "wait"
        of = case(seed, mode, live=live, seconds=seconds, drain=drain)
        found.runs += 1
        found.requests += len(of.requests)
        try:
            played = play(of)
            check(of, played)
        except Exception as error:
            kind = f"{mode}, {'live' if live else 'not live'}, {drain}"
            found.broken.append(f"{kind}, seed {seed}: {type(error).__name__}: {error}")
            continue
        found.events += played.record.scale_ups + played.record.scale_downs
        found.lost += sum(isinstance(entry[2], ReplicaLost) for entry in played.log)
        found.handed += sum(isinstance(entry[2], HandedOver) for entry in played.log)
    raise AssertionError("there is always one more kind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=60, help="in which requests arrive and things break, of each case")
    asked = parser.parse_args()
    began = time.process_time()
    found = tally(asked.events, asked.first_seed, asked.seconds)
    told = [
        f"{found.events:,} scale events in {found.runs} runs with {found.requests:,} requests, {found.lost:,} replicas lost, "
        f"{found.handed:,} batches shared; {len(found.broken)} runs broken; {time.process_time() - began:.0f} s of CPU",
        *found.broken,
    ]
    sys.stdout.write("\n".join(told) + "\n")


if __name__ == "__main__":
    main()
