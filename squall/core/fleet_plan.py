"""What a fleet is built of, before anything has happened: its bounds, the slots that it may use, links, weights and patience.

Plain data, the same for the simulator and the live head, and part of the event log. Knows no replica's state.
"""

from __future__ import annotations

from msgspec import Struct, field

from squall.core.fleet_view import Capacity
from squall.core.types import MILLISECOND, SECOND, Nanos, ReplicaId, Role


class Bounds(Struct, frozen=True):
    """How many replicas of a role there may be, and how many the fleet begins with."""

    minimum: int
    maximum: int
    initial: int


class Share(Struct, frozen=True):
    """The place of a fleet on a cluster where there are others. GPUs are numbered through, node by node.

    Attributes:
        fleet: which one it is, from 0.
        minima: GPUs that the least replicas of each fleet need: nobody else may have the last of them.
        num_gpus, gpus_per_node: of the cluster.
        gpus_per_slot: of one replica of this fleet.
        host_bytes: of a node's memory, for copies of weights; 0 = as much as there may be.
    """

    fleet: int
    minima: tuple[int, ...]
    num_gpus: int
    gpus_per_node: int
    gpus_per_slot: int
    host_bytes: int = 0


class Slots(Struct, frozen=True):
    """Where replicas can be. A replica's id is its slot; slots are numbered node by node.

    Attributes:
        num: of all nodes together; each has the GPUs of one replica, so it is the GPU budget, too.
        per_node: slots of one node; 1 where a replica spans several.
        nodes_per_slot: nodes that one replica spans.
        per_domain: slots that share an NVLink domain (or its like); 1 where nothing joins replicas.
        nodes_per_leaf: nodes that hang on one leaf switch; 0 = all.
        nic_bytes_per_s, link_bytes_per_s: what one replica's GPUs together send to other nodes, and inside their domain.
        shared: where other fleets have GPUs of the same cluster, so that a slot may be taken by them.
        first: those that are taken before their equals, as something of the fleet is there already.
    """

    num: int
    per_node: int
    nodes_per_slot: int = 1
    per_domain: int = 1
    nodes_per_leaf: int = 0
    nic_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    shared: Share | None = None
    first: tuple[ReplicaId, ...] = ()

    def node(self, replica: ReplicaId) -> int:
        """The (first) node of a slot."""
        return replica // self.per_node * self.nodes_per_slot

    def nodes(self, replica: ReplicaId) -> range:
        """All nodes that the slot has GPUs of."""
        first = self.node(replica)
        return range(first, first + self.nodes_per_slot)

    def gpus(self, replica: ReplicaId) -> range:
        """The slot's GPUs; on a cluster that is shared."""
        assert self.shared is not None
        first = self.node(replica) * self.shared.gpus_per_node + replica % self.per_node * self.shared.gpus_per_slot
        return range(first, first + self.shared.gpus_per_slot)

    def domain(self, replica: ReplicaId) -> int:
        return replica // self.per_domain

    def leaf(self, replica: ReplicaId) -> int:
        return self.node(replica) // self.nodes_per_leaf if self.nodes_per_leaf else 0


class Weights(Struct, frozen=True):
    """One model's weights, and how fast a replica that is alone reads them.

    Attributes:
        num_bytes: of one replica, all its GPUs together.
        host_bytes_per_s, ssd_bytes_per_s, store_bytes_per_s: from the DRAM and the SSD of its node, and from the store.
        on_ssd: every node has them on its SSD from the beginning.
    """

    model: str = ""
    num_bytes: int = 0
    num_layers: int = 1
    host_bytes_per_s: float = 0.0
    ssd_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0
    on_ssd: bool = True


class Patience(Struct, frozen=True):
    """How long the controller waits before it does what.

    Attributes:
        up_interval: between two decisions for more replicas of a role; also how often it looks while there is work.
        rest_interval: how often it looks while there is none.
        down_window: a role shrinks to the highest number wanted in the latest window, and once a window.
        idle_ttl: a replica without work keeps its weights for so long.
        start_timeout: one that is not ready after so long is given up, and its slot left alone for a while; None = never.
    """

    up_interval: Nanos = 100 * MILLISECOND
    rest_interval: Nanos = 1 * SECOND
    down_window: Nanos = 30 * SECOND
    idle_ttl: Nanos = 1 * SECOND
    start_timeout: Nanos | None = 600 * SECOND


class FleetPlan(Struct, frozen=True):
    """All of it.

    Attributes:
        bounds: of every role of the fleet: BOTH, or PREFILL and DECODE.
        capacity: of one replica, for policies that want to know.
        live_layers: layers of the model, where replicas can run them one by one (live scaling); 0 where they cannot.
    """

    bounds: dict[Role, Bounds]
    slots: Slots
    weights: Weights = field(default_factory=Weights)
    patience: Patience = field(default_factory=Patience)
    capacity: Capacity | None = None
    live_layers: int = 0

    @classmethod
    def fixed(cls, num_replicas: int) -> FleetPlan:
        """So many colocated replicas, always."""
        return cls({Role.BOTH: Bounds(num_replicas, num_replicas, num_replicas)}, Slots(num_replicas, max(1, num_replicas)))

    @property
    def is_elastic(self) -> bool:
        """The number of replicas may change."""
        return any(bounds.minimum < bounds.maximum for bounds in self.bounds.values())
