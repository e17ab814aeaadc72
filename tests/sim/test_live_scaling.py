"""Live scaling on the virtual clock: the discrete model's schedules come out of the machines, and a burst is served sooner."""

from collections.abc import Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config
from squall.core.actions import AnyAction
from squall.core.events import AnyEvent, HandedOver, LayerArrived, LayersDone
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.live_scaling import LiveLimits
from squall.core.machine import Machine
from squall.core.metrics import Outcome
from squall.core.replica import Replica
from squall.core.types import MILLISECOND, SECOND, MachineId, Nanos, RequestId, Role
from squall.fleet_tables import Fleet, Replicas
from squall.perf.topology import resolve_node
from squall.policies.batching import Vllm
from squall.policies.load import P2p
from squall.sim.fabric import Fabric
from squall.sim.ground import Ground, Shard, bare_ground
from squall.sim.handoff import KvShape
from squall.sim.linear import Linear
from squall.sim.loading import Delays
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
        return Ground(plan, Delays(warm=1000 * SECOND), links, fabric, shard, 1, KvShape(0, self.num_layers), 0)

    def play(self) -> dict[RequestId, Nanos]:
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
