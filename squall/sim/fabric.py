"""The links of a cluster by name, and which of them lie between two places. Made of the hardware catalogue.

Every link is one direction. A GPU has its PCIe lanes and, inside a domain, its NVLink; some GPUs share a PCIe link to the host;
NICs hang beside the GPUs, so that what they carry passes the GPU's lanes but not the host's link; leaf switches do not block
inside, and their uplinks may be oversubscribed; the spine never blocks.

Knows no flows (`sim.network`), no replicas and no weights. GPUs are numbered through: GPU g is on node g // GPUs of a node.
"""

from msgspec import Struct

from squall.errors import ConfigError
from squall.perf.topology import NICS, STORAGE, Node

Path = tuple[str, ...]


class Fabric(Struct, frozen=True):
    """So many nodes of a kind, joined.

    Attributes:
        node: the kind.
        num_nodes: all alike.
        nodes_per_leaf: nodes under one leaf switch; all of them when None.
        oversubscription: what the NICs under a leaf send together / what its uplinks carry; at least 1.
        ssd_per_gpu: bytes a second that one GPU's reader gets from the local disks, however idle they are. None: its share, as
            with a disk for each GPU (BlitzScale's clusters, and what one loader reaches).
        dram_per_node: bytes a second read from a node's DRAM; as much as its links take when None.
        store: the catalogue's name of what all nodes read from when they have no disk; each gets its bandwidth.
    """

    node: Node
    num_nodes: int = 1
    nodes_per_leaf: int | None = None
    oversubscription: float = 1.0
    ssd_per_gpu: float | None = None
    dram_per_node: float | None = None
    store: str = "object-store"

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ConfigError(f"num_nodes must be at least 1, not {self.num_nodes}")
        if self.nodes_per_leaf is not None and self.nodes_per_leaf < 1:
            raise ConfigError(f"nodes_per_leaf must be at least 1, not {self.nodes_per_leaf}")
        if not self.oversubscription >= 1:
            raise ConfigError(f"oversubscription must be at least 1 (uplinks as wide as the NICs), not {self.oversubscription}")
        for key, value in (("ssd_per_gpu", self.ssd_per_gpu), ("dram_per_node", self.dram_per_node)):
            if value is not None and not value > 0:
                raise ConfigError(f"{key} must be above 0 bytes/s, not {value}")
        if self.store not in STORAGE:
            raise ConfigError(f"storage {self.store!r} is unknown: one of {', '.join(STORAGE)}")

    # -- where things are

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.node.num_gpus

    def node_of(self, gpu: int) -> int:
        return gpu // self.node.num_gpus

    def domain_of(self, gpu: int) -> int:
        """Equal numbers are joined by NVLink. A domain may be a part of a node, or several nodes."""
        return gpu // self.node.domain

    def leaf_of(self, node: int) -> int:
        return 0 if self.nodes_per_leaf is None else node // self.nodes_per_leaf

    def nic_of(self, gpu: int) -> str:
        """The NIC nearest to a GPU, without its direction. More NICs than GPUs count as one for each."""
        on_node = gpu % self.node.num_gpus
        return f"node{self.node_of(gpu)}.nic{on_node * self.num_nics // self.node.num_gpus}"

    @property
    def nic_bytes_per_s(self) -> float:
        """Of one NIC (as counted by `nic_of`), a direction."""
        return NICS[self.node.nic].bandwidth * self.node.num_nics / self.num_nics

    @property
    def ssd_bytes_per_s(self) -> float:
        """What one GPU reads from its node's disks when it is alone; 0 where there are none."""
        whole, own = self.node.ssd_bandwidth, self.ssd_per_gpu
        return min(whole, whole / self.node.num_gpus if own is None else own)

    @property
    def num_nics(self) -> int:
        """Of a node, as counted by `nic_of`."""
        return min(self.node.num_nics, self.node.num_gpus)

    # -- links

    @property
    def links(self) -> dict[str, float]:
        """Bytes a second of each, for `Network`."""
        found: dict[str, float] = {}
        for gpu in range(self.num_gpus):
            for way in ("in", "out"):
                found[f"gpu{gpu}.pcie.{way}"] = self.node.host_bandwidth
                if self.node.domain > 1:
                    found[f"gpu{gpu}.nvlink.{way}"] = self.node.link_bandwidth
            if self.node.ssd_bandwidth:
                found[f"gpu{gpu}.ssd"] = self.ssd_bytes_per_s
        for node in range(self.num_nodes):
            found.update(self._node_links(node))
        if self.nodes_per_leaf is not None and self.nodes_per_leaf < self.num_nodes:
            uplink = self.nodes_per_leaf * self.num_nics * self.nic_bytes_per_s / self.oversubscription
            for leaf in range(self.leaf_of(self.num_nodes - 1) + 1):
                found[f"leaf{leaf}.up"] = found[f"leaf{leaf}.down"] = uplink
        return found

    def _node_links(self, node: int) -> dict[str, float]:
        kind, found = self.node, {}
        if kind.gpus_per_host_link > 1:
            for link in range(-(-kind.num_gpus // kind.gpus_per_host_link)):
                found[f"node{node}.host{link}.up"] = found[f"node{node}.host{link}.down"] = kind.host_bandwidth
        for nic in range(self.num_nics):
            found[f"node{node}.nic{nic}.in"] = found[f"node{node}.nic{nic}.out"] = self.nic_bytes_per_s
        if kind.ssd_bandwidth:
            found[f"node{node}.ssd"] = kind.ssd_bandwidth
        if self.dram_per_node is not None:
            found[f"node{node}.dram"] = self.dram_per_node
        found[f"node{node}.store"] = STORAGE[self.store].read_bandwidth
        return found

    # -- paths

    def gpu_to_gpu(self, source: int, target: int) -> Path:
        """NVLink inside a domain, PCIe inside a node, else the network; nothing within one GPU."""
        if source == target:
            return ()
        if self.node.domain > 1 and self.domain_of(source) == self.domain_of(target):
            return f"gpu{source}.nvlink.out", f"gpu{target}.nvlink.in"
        there = f"gpu{target}.pcie.in"
        if self.node_of(source) != self.node_of(target):
            return f"gpu{source}.pcie.out", *self._across(self.nic_of(source), source, target), there
        up, down = self._host_link(source, "up"), self._host_link(target, "down")
        same_switch = not up or up[0].removesuffix(".up") == down[0].removesuffix(".down")
        return (f"gpu{source}.pcie.out", there) if same_switch else (f"gpu{source}.pcie.out", *up, *down, there)

    def host_to_gpu(self, node: int, gpu: int) -> Path:
        """From a node's DRAM; to a GPU elsewhere it leaves by the NIC of the same number as that by which it arrives."""
        dram: Path = (f"node{node}.dram",) if self.dram_per_node is not None else ()
        if node == self.node_of(gpu):
            return *dram, *self._host_link(gpu, "down"), f"gpu{gpu}.pcie.in"
        twin = node * self.node.num_gpus + gpu % self.node.num_gpus
        return *dram, *self._host_link(twin, "down"), *self._across(self.nic_of(twin), twin, gpu), f"gpu{gpu}.pcie.in"

    def ssd_to_gpu(self, gpu: int) -> Path:
        """From the disks of the GPU's own node."""
        return f"node{self.node_of(gpu)}.ssd", f"gpu{gpu}.ssd", *self._host_link(gpu, "down"), f"gpu{gpu}.pcie.in"

    def store_to_gpu(self, gpu: int) -> Path:
        return f"node{self.node_of(gpu)}.store", *self._host_link(gpu, "down"), f"gpu{gpu}.pcie.in"

    def _across(self, nic: str, source: int, target: int) -> Path:
        """From node to node."""
        leaves = self.leaf_of(self.node_of(source)), self.leaf_of(self.node_of(target))
        between = (f"leaf{leaves[0]}.up", f"leaf{leaves[1]}.down") if leaves[0] != leaves[1] else ()
        return f"{nic}.out", *between, f"{self.nic_of(target)}.in"

    def _host_link(self, gpu: int, way: str) -> Path:
        """The PCIe link that a GPU shares with others; where it has one of its own, its lanes are that."""
        shared = self.node.gpus_per_host_link
        if shared == 1:
            return ()
        return (f"node{self.node_of(gpu)}.host{gpu % self.node.num_gpus // shared}.{way}",)
