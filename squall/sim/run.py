"""A whole run: the machines that a configuration describes, on a virtual clock, over a workload.

Knows how the parts fit together and nothing of how they work. Reads and writes no files.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import chain
from operator import attrgetter

from squall.config import Config
from squall.core.controller import Controller
from squall.core.events import AnyEvent, Cancelled
from squall.core.machine import Machine
from squall.core.metrics import LinkLevels, RunRecord
from squall.core.pipeline import replica_of
from squall.core.types import CONTROLLER, FOREVER, ROUTER, SECOND, MachineId, Nanos, ReplicaId, RequestId, RunId
from squall.deployment import router_of
from squall.perf.latency import LatencyModel
from squall.sim.census import Census
from squall.sim.driver import Driver
from squall.sim.ground import Ground, Wires, bare_ground
from squall.sim.kinds import Kind, each, files_outputs_of
from squall.sim.loading import Delays, Loader
from squall.sim.seats import EventLog
from squall.sim.world import World
from squall.workload.spec import OfferedRequest

TOGETHER = 256
"""Arrivals that are made at once: one by one costs more, and all of them much memory."""


def simulate(
    config: Config,
    requests: Sequence[OfferedRequest],
    latency: LatencyModel,
    num_blocks: int,
    *,
    cancellations: Sequence[tuple[Nanos, RequestId]] = (),
    delays: Delays | None = None,
    ground: Ground | None = None,
    kinds: Sequence[Kind] = (),
    max_steps: int = FOREVER,
    until: Nanos = FOREVER,
    log: EventLog | None = None,
    cut_off: Callable[[ReplicaId, RunId, int, Nanos], None] | None = None,
    created: Callable[[Nanos, MachineId, Machine], None] | None = None,
    watch: Callable[[World], EventLog] | None = None,
) -> RunRecord:
    """Serve `requests` with the fleet of `config` until nothing is left to happen.

    Args:
        cancellations: when the clients of which requests go away.
        until: when the simulation ends, whatever is left to happen; who arrives then or later is left out of the record.

    The others are those of `Body`.
    """
    began = time.perf_counter()
    body = Body(
        config, requests, latency, num_blocks, delays=delays, ground=ground, kinds=kinds, max_steps=max_steps, log=log,
        cut_off=cut_off, created=created, watch=watch,
    )  # fmt: skip
    with _no_collection():
        body.driver.run(body.offered(cancellations), until)
    record = body.record()
    record.wall_s = time.perf_counter() - began
    return record


class Body:
    """One fleet, before anything has happened: its machines, in a driver, and the world that they act upon.

    Args:
        config: its fleet, replica, batching, route and queue tables are read.
        requests: with unique ids; block hashes, where there are any, are of `config.replica.block_size` tokens.
        latency: prices the steps of every replica.
        num_blocks: KV blocks of every replica.
        delays: of starting, loading, warming and stopping a replica. When None, those of `[startup]`, and the fleet with which
            the simulation begins is up at 0.
        ground: what the fleet stands on; None is a cluster of which only its size is known, where weights are just there.
        wires: the network; when None, one of the fleet's own.
        kinds: the replicas of a fleet that are not alike, kind by kind; `latency` and `num_blocks` are then of nobody.
        max_steps: the longest run of steps; 1 is the oracle to which any other must be equal.
        log: called after every event.
        cut_off: as `Driver.cut_off`.
        created: called with every machine, before its first event.
        watch: given the world before anything happens; what it returns takes the place of `log`, and may end the simulation by
            raising an exception of its own, which comes out of here.
    """

    def __init__(
        self,
        config: Config,
        requests: Sequence[OfferedRequest],
        latency: LatencyModel,
        num_blocks: int,
        *,
        delays: Delays | None = None,
        ground: Ground | None = None,
        wires: Wires | None = None,
        kinds: Sequence[Kind] = (),
        max_steps: int = FOREVER,
        log: EventLog | None = None,
        cut_off: Callable[[ReplicaId, RunId, int, Nanos], None] | None = None,
        created: Callable[[Nanos, MachineId, Machine], None] | None = None,
        watch: Callable[[World], EventLog] | None = None,
    ) -> None:
        of_each = each(kinds)
        latencies = {replica: kind.latency for replica, kind in enumerate(of_each)}
        files_outputs = any(files_outputs_of(kind.config) for kind in kinds) if kinds else files_outputs_of(config)
        self._requests = requests
        self.world = world = World(requests, latency, max_steps, latencies, files_outputs)
        if watch is not None:
            log = watch(world)
        block_size = config.replica.block_size
        if ground is None:
            ground = bare_ground(config)
        self._whole = ground.links  # as wide as they are unless something is wrong
        plan = ground.plan
        self.slots = plan.slots
        router = router_of(config, plan.is_elastic)
        controller = Controller(plan, config.scale, config.load if ground.fabric is not None else None)
        controller.traffic = router

        def make(replica: ReplicaId, now: Nanos) -> Machine:
            of, blocks = (of_each[replica].config, of_each[replica].num_blocks) if of_each else (config, num_blocks)
            machine = replica_of(replica, of.batching, blocks, block_size, of.replica.pp)
            if created is not None:
                created(now, replica, machine)
            return machine

        machines: dict[MachineId, Machine] = {ROUTER: router, CONTROLLER: controller}
        delays_now = ground.delays if delays is None else delays
        self.census = Census(controller, delays_now) if plan.is_elastic or plan.slots.shared is not None else None
        if created is not None:
            for id, machine in machines.items():
                created(0, id, machine)
        for replica in range(config.fleet.num_initial if plan.slots.shared is None else 0):  # elsewhere it depends on the others
            machines[replica] = make(replica, 0)
        if self.census is not None:
            machines[CONTROLLER] = self.census
        self.faults = faults = ground.faults(config)
        pools = dict.fromkeys(range(plan.slots.num), (num_blocks, block_size))
        pools |= {replica: (kind.num_blocks, block_size) for replica, kind in enumerate(of_each)}
        self._network, _, _ = wires = wires or ground.wires(record=config.run.series_s is not None)
        begins_up = delays is None
        self.loader = Loader(pools, delays_now, ground.roads(wires), faults, begins_up, kv=ground.kv_moves(wires))
        stages = {replica: kind.config.replica.pp for replica, kind in enumerate(of_each)}
        self.driver = Driver(machines, world, self.loader, log, config.replica.pp, plan.live_layers, make, stages)
        if faults is not None:
            faults.set_speed = self.driver.set_speed
        self.driver.cut_off = cut_off
        self.driver.in_vain_after = _in_vain_after(config)
        gpus = [kind.config.replica.tp * kind.config.replica.pp for kind in of_each] or [config.replica.tp * config.replica.pp]
        self._gpus_per_replica = sum(gpus), len(gpus)  # those that are not alike are held equally long

    def offered(self, cancellations: Sequence[tuple[Nanos, RequestId]] = ()) -> Iterator[tuple[Nanos, AnyEvent]]:
        """What clients do of their own accord, in order of time; those who wait for an answer are released by the world."""
        own = [request for request in sorted(self._requests, key=attrgetter("arrived_at")) if request.after < 0]
        some = (own[first : first + TOGETHER] for first in range(0, len(own), TOGETHER))
        arrivals = chain.from_iterable(map(self.world.arrivals, some))
        return merge(arrivals, _cancellations(cancellations), key=lambda offered: offered[0]) if cancellations else arrivals

    def record(self) -> RunRecord:
        """What became of everybody, once the run has ended."""
        driver, world = self.driver, self.world
        record = world.record(driver.now)
        record.num_events = driver.num_events
        record.num_steps = driver.num_steps
        record.num_absent = world.num_absent
        record.scale_ups, record.scale_downs = driver.scale_ups, driver.scale_downs
        gpus, replicas = self._gpus_per_replica
        record.gpu_nanos = driver.replica_nanos * gpus // replicas
        moved = [] if self.loader.roads is None else self.loader.roads.weights.ended
        record.weights = [each.delivered() for each in moved]
        if self.census is not None:
            record.fleet = self.census.use(driver.now)
            record.decisions = self.census.decisions
            record.weights += self.census.mocked
        record.weights.sort(key=lambda each: each.began_at)
        links = self._network.links.values()
        record.links = [LinkLevels(link.name, int(self._whole[link.name]), link.series) for link in links if link.series]
        return record


@contextmanager
def _no_collection() -> Iterator[None]:
    """A simulation leaves no cycles behind; to look for some among the requests of a thousand replicas takes 4 % of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _in_vain_after(config: Config) -> Nanos:
    """By then whatever was broken on purpose is whole again, and a fleet that can come up has, three times over."""
    ends = [fault.at_s + fault.notice_s + (fault.duration_s or 0) for fault in config.faults]
    return round((max(3 * config.fleet.start_timeout_s, config.hazards.longest_s, 3600) + max(ends, default=0)) * SECOND)


def _cancellations(cancellations: Sequence[tuple[Nanos, RequestId]]) -> Iterator[tuple[Nanos, AnyEvent]]:
    for at, request in sorted(cancellations):
        yield at, Cancelled(request)
