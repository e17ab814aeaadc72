"""Live scaling on the virtual clock: the discrete model's schedules come out of the machines, and a burst is served sooner."""

from collections.abc import Sequence
from random import Random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Cluster, Config, Model, Queue
from squall.core.actions import AnyAction
from squall.core.events import (
    Adopted,
    AnyEvent,
    HandedOver,
    LayerArrived,
    LayersDone,
    LivePaired,
    Offered,
    ReplicaLost,
    StepsDone,
    Unpaired,
    Woke,
)
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.live_batch import LiveLimits
from squall.core.machine import Machine
from squall.core.metrics import Outcome, RunRecord
from squall.core.replica import Replica
from squall.core.types import FOREVER, MILLISECOND, SECOND, MachineId, Nanos, RequestId, Role
from squall.fleet_tables import Fault, Fleet, Replicas
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.topology import resolve_node
from squall.policies.batching import Vllm
from squall.policies.load import Chain, P2p
from squall.policies.scale import Ttft
from squall.sim.fabric import Fabric
from squall.sim.ground import Ground, Shard, bare_ground, ground
from squall.sim.handoff import KvShape
from squall.sim.linear import Linear
from squall.sim.loading import Delays
from squall.sim.observe import Observer, watched
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.sim.zigzag import evenly, zigzag
from squall.workload.spec import OfferedRequest

UNIT = MILLISECOND
"""One layer of one batch."""
UNIT_BYTES = 12_500_000
"""What a link of 100 Gbps carries in it."""
FIRST_LAYER = 100
"""Units until the first layer has arrived: time enough for the request that makes the fleet grow."""
TOKENS = 16
Log = list[tuple[Nanos, MachineId, AnyEvent, Sequence[AnyAction]]]


class Two(Struct, frozen=True):
    """Wants a second replica as soon as anybody has asked for anything."""

    def __call__(self, view: ScaleView) -> Wanted:
        role = view.roles[Role.BOTH]
        return Wanted(
            {Role.BOTH: 2 if role.num_waiting or role.num_ready > 1 else max(1, role.num_ready + role.num_coming)}, "two"
        )


class Units:
    """A pair in the discrete model's world: equal batches, a layer each `every` units, activations and KV at once.

    The first request makes the fleet grow and is served before anything else; then all batches arrive with the first layer.
    """

    def __init__(self, num_batches: int, num_layers: int, every: int) -> None:
        self.num_batches = num_batches
        self.num_layers = num_layers
        self.log: Log = []
        fleet = Fleet(replicas=Replicas(1, 2, 1))
        self.config = Config(fleet=fleet, scale=Two(), load=P2p(live=True), batching=Vllm(16, TOKENS, False))  # type: ignore[arg-type]
        self.ground = self._ground(every)

    def _ground(self, every: int) -> Ground:
        """Two nodes of one GPU each, and nothing after the last layer."""
        fabric = Fabric(replace(resolve_node("hgx-h100"), num_gpus=1, num_nics=1, gpus_per_host_link=1, domain=1), 2)
        links = {name: 12.5e9 if ".nic" in name else bandwidth for name, bandwidth in fabric.links.items()}
        bare = bare_ground(self.config).plan
        plan = replace(
            bare,
            slots=replace(bare.slots, num=2, per_node=1, nic_bytes_per_s=12.5e9),
            weights=replace(bare.weights, num_layers=self.num_layers),
            live_layers=self.num_layers,
        )
        shard = Shard((FIRST_LAYER * UNIT_BYTES, *[every * UNIT_BYTES] * (self.num_layers - 1)), 0)
        return Ground(plan, Delays(capture=1000 * SECOND), links, fabric, shard, 1, KvShape(0, self.num_layers), 0)

    def play(self) -> dict[RequestId, float]:
        """When each batch ended, in units after the first layer."""
        first = SECOND + FIRST_LAYER * UNIT
        requests = [OfferedRequest(0, SECOND, TOKENS, 1)]
        requests += [OfferedRequest(1 + batch, first, TOKENS, 1) for batch in range(self.num_batches)]
        latency = Linear(16 * UNIT * self.num_layers)
        record = simulate(
            self.config, requests, latency, 1000, ground=self.ground,
            log=lambda *entry: self.log.append(entry), created=self._relax,
        )  # fmt: skip
        assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
        arrived = [now for now, id, event, _ in self.log if isinstance(event, LayerArrived) and id >= 0]
        assert arrived[0] == first
        return {row.id: (row.finished_at - first) / UNIT for row in record.requests if row.id}

    def _relax(self, _now: Nanos, _id: MachineId, machine: Machine) -> None:
        """The discrete model has no bound on what is begun."""
        if isinstance(machine, Replica):
            most = self.num_batches
            machine.limits = LiveLimits(most, most, 1, most + 1)

    def splits(self) -> dict[RequestId, tuple[int, int]]:
        """Layers at the target and at the source, of each batch."""
        found: dict[RequestId, tuple[int, int]] = dict.fromkeys(range(1, self.num_batches + 1), (self.num_layers, 0))
        for _, _, event, _ in self.log:
            if isinstance(event, HandedOver):
                for request in event.requests:
                    found[request.id] = event.layer, self.num_layers - event.layer
        found.pop(0, None)
        return found


@pytest.mark.parametrize(
    ("num_batches", "num_layers", "mean", "last"), [(7, 7, 19.57, 29), (12, 32, 124.7, 200)], ids=["7 by 7", "12 by 32"]
)
def test_the_discrete_model_comes_out_of_the_machines(num_batches: int, num_layers: int, mean: float, last: int) -> None:
    units = Units(num_batches, num_layers, every=6)
    ends = units.play()
    paper = zigzag(evenly(num_batches, num_layers, 6))
    assert list(ends.values()) == list(paper.ends)
    assert list(units.splits().values()) == list(paper.splits)
    assert sum(ends.values()) / num_batches == pytest.approx(mean, abs=0.05)
    assert max(ends.values()) == last


def test_the_splits_of_seven_batches_are_those_of_the_published_model() -> None:
    units = Units(7, 7, every=6)
    assert list(units.play().values()) == [7, 12, 17, 21, 24, 27, 29]
    assert list(units.splits().values()) == [(1, 6), (2, 5), (2, 5), (3, 4), (4, 3), (4, 3), (5, 2)]
    layers = [event for _, _, event, _ in units.log if isinstance(event, LayersDone)]
    assert len(layers) == 21 + 8  # one at a time at the target, the rest at once at the source, and the first request there


# -- a real model on a real network


def burst_config(*, live: bool, mode: str = "colocated", faults: tuple[Fault, ...] = (), retries: int = 3) -> Config:
    """Llama 3.1 8B on H100s, one to a node, joined at 100 Gbps."""
    some = Replicas(1, 3, 1)
    fleet = Fleet(replicas=Replicas(1, 4, 1)) if mode == "colocated" else Fleet(mode="disaggregated", prefill=some, decode=some)
    return Config(
        model=Model(name="meta-llama/Llama-3.1-8B"),
        cluster=Cluster(gpu="h100-sxm", nodes=6, gpus_per_node=1, nic_gbps=100),
        fleet=fleet,
        scale=Ttft(ttft_s=0.45),
        load=Chain(live=live),
        batching=Vllm(64, 2048, False),
        faults=faults,
        queue=Queue(max_retries=retries),
    )


def play(
    config: Config,
    requests: Sequence[OfferedRequest],
    max_steps: int = FOREVER,
    cancellations: Sequence[tuple[Nanos, RequestId]] = (),
) -> tuple[RunRecord, list[tuple[Nanos, MachineId, AnyEvent]], dict[MachineId, Machine]]:
    """The run, what was said in it (all but ends of runs and wake-ups), and the machines as they are at its end."""
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    latency, num_blocks = prepare(config, model, gpu)
    said: list[tuple[Nanos, MachineId, AnyEvent]] = []
    machines: dict[MachineId, Machine] = {}

    def log(now: Nanos, id: MachineId, event: AnyEvent, _: Sequence[AnyAction]) -> None:
        if not isinstance(event, StepsDone | Woke):
            said.append((now, id, event))

    record = simulate(
        config, requests, latency, num_blocks, ground=ground(config, model, gpu, latency, num_blocks), log=log,
        max_steps=max_steps, cancellations=cancellations, created=lambda _, id, machine: machines.__setitem__(id, machine),
    )  # fmt: skip
    return record, said, machines


def burst(count: int, seed: int = 0) -> list[OfferedRequest]:
    """Two seconds of it; some end at their first token."""
    rng = Random(seed)
    times = sorted(rng.randrange(2 * SECOND) for _ in range(count))
    return [OfferedRequest(id, at, rng.randint(1000, 3000), rng.choice([1, 16, 64])) for id, at in enumerate(times)]


def count(said: list[tuple[Nanos, MachineId, AnyEvent]], kind: type) -> int:
    return sum(isinstance(event, kind) for _, _, event in said)


def check_ended_and_clean(
    record: RunRecord, said: list[tuple[Nanos, MachineId, AnyEvent]], machines: dict[MachineId, Machine]
) -> None:
    assert all(row.outcome in (Outcome.COMPLETED, Outcome.CANCELLED) for row in record.requests)
    dead = {event.replica for _, _, event in said if isinstance(event, ReplicaLost)}
    for id, machine in machines.items():
        if isinstance(machine, Replica) and id not in dead:
            assert machine.num_used_blocks == 0


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_a_burst_has_its_first_tokens_sooner(mode: str) -> None:
    requests = burst(80)
    alone, _, _ = play(burst_config(live=False, mode=mode), requests)
    together, said, machines = play(burst_config(live=True, mode=mode), requests)
    check_ended_and_clean(together, said, machines)
    assert count(said, HandedOver) > 5
    means = [sum(row.first_token_at - row.arrived_at for row in record.requests) for record in (alone, together)]
    assert means[1] < 0.9 * means[0]


def test_both_halves_of_a_split_prefill_go_to_one_decode_replica() -> None:
    _, said, _ = play(burst_config(live=True, mode="disaggregated"), burst(80))
    halves = [event for _, _, event in said if isinstance(event, Offered) and len(event.parts) == 2]
    assert halves
    for offered in halves:
        target, source = offered.parts
        assert target.source != source.source
        assert (target.first_layer, target.last_layer, source.last_layer) == (0, source.first_layer, 0)
    adopted = {event.request for _, _, event in said if isinstance(event, Adopted)}
    assert {offered.request.id for offered in halves} <= adopted


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_k_steps_are_k_single_steps_while_a_pair_works(mode: str) -> None:
    requests = burst(50, seed=3)
    gone = [(request.arrived_at + 300 * MILLISECOND, request.id) for request in requests[::7]]
    many, said, machines = play(burst_config(live=True, mode=mode), requests, cancellations=gone)
    single, said_singly, _ = play(burst_config(live=True, mode=mode), requests, 1, gone)
    assert count(said, HandedOver) > 3
    assert many.requests == single.requests
    assert said == said_singly
    check_ended_and_clean(many, said, machines)


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
@pytest.mark.parametrize("who", ["target", "source"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_pair_may_lose_either_of_its_two_at_any_time(mode: str, who: str, share: float) -> None:
    requests = burst(80, seed=5)
    _, said, _ = play(burst_config(live=True, mode=mode), requests)
    began, pair = next((now, event) for now, _, event in said if isinstance(event, LivePaired))
    ended = next((now for now, _, event in said if isinstance(event, Unpaired)), said[-1][0])
    at_s = round((began + share * (ended - began)) / SECOND, 4)
    fault = Fault(at_s=at_s, kind="replica", which=pair.target if who == "target" else pair.source)
    record, said, machines = play(burst_config(live=True, mode=mode, faults=(fault,)), requests)
    assert any(isinstance(event, Unpaired) and event.lost for _, _, event in said)
    check_ended_and_clean(record, said, machines)


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_who_looks_on_sees_each_request_at_work_and_changes_nothing(mode: str) -> None:
    config, requests = burst_config(live=True, mode=mode), burst(80)
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    latency, num_blocks = prepare(config, model, gpu)
    observer = Observer(latency, config.replica.block_size)
    log, created = watched([observer])
    seen = simulate(
        config, requests, latency, num_blocks, ground=ground(config, model, gpu, latency, num_blocks), log=log, created=created
    )
    unseen, said, _ = play(config, requests)
    assert count(said, HandedOver) > 5
    assert seen.requests == unseen.requests
    for row in seen.requests:
        assert 0 < observer.observed.execution[row.id] <= row.finished_at - row.arrived_at
