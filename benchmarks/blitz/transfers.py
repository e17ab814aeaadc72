"""How long weights take when nothing else moves: chains of any length, the ideal load times, six replicas at once."""

from collections.abc import Sequence
from itertools import count

from msgspec.structs import replace

from benchmarks.blitz.cases import Pair
from squall.core.actions import AnyAction, StartReplica
from squall.core.events import AnyEvent, HandedOver, Submitted, WeightsLoaded
from squall.core.fleet_view import Place, Transfer
from squall.core.types import MILLISECOND, SECOND, MachineId, Nanos, ReplicaId, RequestId
from squall.fleet_tables import Replicas
from squall.perf.topology import resolve_node
from squall.policies.load import Load
from squall.policies.scale import Schedule
from squall.policies.scale.plans import Step
from squall.sim.fabric import Fabric
from squall.sim.network import Network
from squall.sim.weights import CHUNK, WeightFlows
from squall.workload.spec import OfferedRequest

G = 10**9
NODE = "blitz-cluster-a"
IDEAL = {(16, 1): (12.8, 1.0, 1.28), (24, 2): (19.2, 1.5, 1.92), (36, 4): (28.8, 2.25, 2.88)}
"""Gigabytes a GPU and GPUs: seconds from SSD, host memory and over RDMA, as the paper has them."""


def took(gigabytes: int, tp: int, num_nodes: int, transfers: Sequence[Transfer]) -> dict[ReplicaId, float]:
    """When each replica has its weights, in seconds after all began."""
    fabric = Fabric(resolve_node(NODE), num_nodes)
    network = Network(fabric.links)
    layers = [gigabytes * G // 20] * 20
    flows = WeightFlows(network, fabric, lambda replica: range(replica * tp, replica * tp + tp), layers, 1, count())
    for transfer in transfers:
        for replica in transfer.path:
            flows.load(replica, transfer, 0, layers=False)
    ends: dict[ReplicaId, float] = {}
    while (due := network.next_end()) is not None:
        ends |= {found.replica: due / SECOND for found in flows.on(network.advance(due), due)}
    return ends


def chains(receivers: Sequence[int] = (1, 3, 7, 15)) -> list[tuple[int, float, float]]:
    """Receivers on a node each: how many, seconds, and what they may be (5 % more than one, and a chunk a hop)."""
    single = max(took(16, 1, 2, [Transfer("8B", Place("gpu", 0), (8,), "p2p")]).values())
    rows = []
    for number in receivers:
        path = tuple(8 * (hop + 1) for hop in range(number))
        seconds = max(took(16, 1, number + 1, [Transfer("8B", Place("gpu", 0), path, "chain")]).values())
        rows.append((number, seconds, 1.05 * single + (number - 1) * CHUNK / 12.5e9))
    return rows


def ideal_loads() -> list[tuple[str, float, float]]:
    """What is loaded from where, seconds, and the paper's. From host memory both GPUs of a PCIe link load at once."""
    rows = []
    for (gigabytes, tp), known in IDEAL.items():
        here = Transfer("m", Place("ssd", 1), (8 // tp,), "disk")
        pair = range(8 // tp, 8 // tp + max(1, 2 // tp))
        hosts = [Transfer("m", Place("host", 1), (replica,), "host") for replica in pair]
        peer = Transfer("m", Place("gpu", 0), (8 // tp,), "p2p")
        ways = (("SSD", [here]), ("host", hosts), ("RDMA", [peer]))
        for (way, transfers), seconds in zip(ways, known, strict=True):
            rows.append((f"{gigabytes} GB x {tp} from {way}", max(took(gigabytes, tp, 2, transfers).values()), seconds))
    return rows


class Six:
    """One prefill replica that becomes seven at one instant, while prompts of 2,000 tokens come, one each 20 ms for two seconds.

    Decode has two replicas from the beginning. With the placing of the seed (lowest rank first) the first node has the sources.
    """

    at_s = 5.0

    def __init__(self, pair: Pair, load: Load) -> None:
        self.started: Nanos | None = None
        self.loaded: dict[ReplicaId, Nanos] = {}
        self._offered: set[RequestId] = set()
        self._elsewhere: set[RequestId] = set()
        elastic = pair.elastic(load)
        scale = Schedule((Step(0.0, None, 1, 2), Step(self.at_s, None, 7, 2)))
        fleet = replace(elastic.fleet, prefill=Replicas(1, 7), decode=2)
        first = round(self.at_s * SECOND) - 50 * MILLISECOND
        requests = [OfferedRequest(i, first + i * 20 * MILLISECOND, 2000, 20) for i in range(100)]
        self._record = pair.play(replace(elastic, scale=scale, fleet=fleet), requests, self._log)

    def _log(self, now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        starting = any(isinstance(action, StartReplica) for action in actions)
        if now and starting and self.started is None:
            self.started = now
        match event:
            case WeightsLoaded(replica) if now:
                self.loaded.setdefault(replica, now)
            case Submitted(request) if id > 2:
                self._offered.add(request.id)
            case HandedOver(layer=0, requests=requests):
                self._elsewhere.update(request.id for request in requests)

    @property
    def first_token_s(self) -> float:
        """From the decision to the first token of a request of which a new replica has run a layer at least."""
        assert self.started is not None
        by_new = self._offered - self._elsewhere
        return (min(row.first_token_at for row in self._record.requests if row.id in by_new) - self.started) / SECOND

    @property
    def loaded_s(self) -> float:
        """From the decision until all six have their weights."""
        assert self.started is not None
        return (max(self.loaded.values()) - self.started) / SECOND

    @property
    def mean_ttft_s(self) -> float:
        rows = self._record.requests
        return sum(row.first_token_at - row.arrived_at for row in rows) / len(rows) / SECOND
