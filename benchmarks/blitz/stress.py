"""Scale events by the thousand with random faults, and an hour of code traffic on 64 GPUs."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.blitz.cases import Pair
from benchmarks.blitz.traffic import densified, recorded
from squall.config import Config
from squall.core.actions import AnyAction, Reply, StartReplica
from squall.core.events import AnyEvent, LayersDone, ReplicaLost, ReplicaStopped, StepsDone
from squall.core.metrics import Outcome
from squall.core.types import CONTROLLER, MachineId, Nanos, ReplicaId, RequestId
from squall.fleet_tables import Hazards
from squall.policies.load import Auto
from squall.workload.build import build
from squall.workload.spec import MarkovArrivals, OfferedRequest, SyntheticWorkload, UniformLength


class Watch:
    """Counts, from outside, what a fleet may never do.

    Attributes:
        ends: how often each request's end was told, by an engine's last token or by a refusal.
        over_budget: how often a replica was started when all GPUs were held.
    """

    def __init__(self, num_slots: int) -> None:
        self.ends: Counter[RequestId] = Counter()
        self.over_budget = self.lost = 0
        self._num_slots = num_slots
        self._held: set[ReplicaId] = set()

    def __call__(self, _now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        match event:
            case StepsDone() | LayersDone():
                self.ends.update(event.stopped)
            case ReplicaLost(replica) if id == CONTROLLER:
                self.lost += 1
                self._held.discard(replica)
            case ReplicaStopped(replica):
                self._held.discard(replica)
        for action in actions:
            match action:
                case Reply(request):
                    self.ends[request] += 1
                case StartReplica(replica):
                    self.over_budget += replica in self._held or len(self._held) >= self._num_slots
                    self._held.add(replica)


class Stressed(Struct):
    """What came of it; `wrong` are requests without exactly one end, and records that say something else than the machines.

    A run that ends with an error is a defect: it is named in `broken` by its seed and counts for nothing else.
    """

    events: int = 0
    runs: int = 0
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    over_budget: int = 0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def stressed(pair: Pair, num_events: int) -> Stressed:
    """Runs of a minute, with rates that jump and replicas and nodes that die, until so many scale events were seen."""
    found = Stressed()
    seed = 0
    while found.events < num_events:
        config = _breaking(pair, seed)
        watch = Watch(pair.num_slots)
        began = time.process_time()
        requests = _jumping(seed)
        seed += 1
        try:
            record = pair.play(config, requests, watch)
        except Exception as error:
            found.broken.append(f"seed {seed - 1}: {type(error).__name__}: {error}")
            continue
        finally:
            found.cpu_s += time.process_time() - began
        found.events += record.scale_ups + record.scale_downs
        found.runs += 1
        found.requests += len(requests)
        found.lost += watch.lost
        found.over_budget += watch.over_budget
        found.outcomes.update(row.outcome.value for row in record.requests)
        known = {row.id for row in record.requests if row.outcome is not Outcome.UNFINISHED}
        found.wrong += sum(watch.ends[request.id] != 1 or request.id not in known for request in requests)
    return found


def _breaking(pair: Pair, seed: int) -> Config:
    """A replica dies every few seconds, a node every minute, half of these with two seconds of notice; as often as replicas die,
    others are slow for a while, and as often as nodes do, their links are slow or lost."""
    often, seldom = 600 / pair.num_slots, 30
    hazards = Hazards(
        replica_per_hour=often, node_per_hour=seldom, node_back_s=5, notice_s=2.0 * (seed % 2),
        link_lost_per_hour=seldom, link_lost_s=2, link_per_hour=seldom, link_s=5, link_factor=0.1,
        slow_per_hour=often, slow_s=5, slow_factor=0.3,
    )  # fmt: skip
    config = pair.elastic(Auto(live=seed % 3 > 0))
    fleet = replace(config.fleet, down_window_s=0.333, idle_ttl_s=0.333)
    return replace(config, hazards=hazards, fleet=fleet, run=replace(config.run, seed=seed))


def _jumping(seed: int) -> list[OfferedRequest]:
    arrivals = MarkovArrivals((0.5, 12.0), (1.0, 1.0))
    workload = SyntheticWorkload(arrivals, UniformLength(2000, 8000), UniformLength(1, 40), None, 60.0)
    return build(workload, seed, Path())


class Hour(Struct):
    """An hour of Azure's code traffic, ten times as dense; `cpu_s` of the thread that simulates."""

    requests: int
    completed: int
    cpu_s: float
    events: int
    steps: int
    scale_ups: int
    gpu_share: float


def hour(nodes: int, factor: float, seconds: float | None) -> Hour:
    """On so many nodes of cluster A; `seconds` of it, or all."""
    pair = Pair("8B/AzureCode", "llama-3-8b", "code", "blitz-cluster-a", nodes, 1, 0.333)
    requests = densified(recorded("code"), factor, 0)
    if seconds is not None:
        requests = [request for request in requests if request.arrived_at < seconds * 1e9]
    config = pair.elastic(Auto(live=True))
    _ = pair.stands_on  # prices and pools are made before
    began = time.thread_time()
    record = pair.play(config, requests)
    took = time.thread_time() - began
    done = sum(row.outcome is Outcome.COMPLETED for row in record.requests)
    share = record.gpu_nanos / (record.ended_at * pair.num_slots)
    return Hour(len(requests), done, took, record.num_events, record.num_steps, record.scale_ups, share)
