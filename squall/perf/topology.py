"""What joins GPUs to each other, to hosts and to storage: nodes, NICs, switches and storage, by name.

Knows no model and no traffic: these are the rates of the data sheets, a direction each. What a transfer reaches is measured or
estimated elsewhere. Every row says where its links are from; DRAM and disks can be chosen when a machine is bought, and are
those of a usual one.
"""

import difflib

from msgspec import Struct
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.hardware import Gpu, resolve_gpu

_GBIT, _GIGA, _GIB = 1e9 / 8, 1e9, 1 << 30


class Node(Struct, frozen=True):
    """A machine with GPUs.

    Attributes:
        gpu: its name in the GPU catalogue.
        num_gpus: in the machine.
        domain: GPUs that NVLink (or its like) joins to each other; 1 where only PCIe does.
        link_bandwidth: bytes a second and direction inside a domain, per GPU.
        gpus_per_host_link: GPUs that share one PCIe link to the host.
        host_bandwidth: bytes a second and direction of that PCIe link.
        nic: its name in the NIC catalogue; `num_nics` of them.
        host_memory: bytes of DRAM.
        ssd_bandwidth: bytes a second that all local disks read together; 0 where there are none.
    """

    name: str
    gpu: str
    num_gpus: int
    domain: int
    link_bandwidth: float
    gpus_per_host_link: int
    host_bandwidth: float
    nic: str
    num_nics: int
    host_memory: int
    ssd_bandwidth: float
    source: str


class Nic(Struct, frozen=True):
    """A network card: bytes a second and direction of all its ports; `rdma` moves memory without the CPU."""

    name: str
    bandwidth: float
    rdma: bool
    source: str


class Switch(Struct, frozen=True):
    """A switch: its ports, bytes a second and direction of each, and seconds from port to port."""

    name: str
    num_ports: int
    port_bandwidth: float
    latency_s: float
    source: str


class Storage(Struct, frozen=True):
    """Where weights lie: bytes a second of sequential reads by one machine, and seconds to the first byte."""

    name: str
    read_bandwidth: float
    latency_s: float
    source: str


# name, GPU, GPUs, domain, link GB/s, GPUs a host link, host GB/s, NIC, NICs, host GiB, SSD GB/s | source
_NODES = """
azure-nc96ads-a100-v4   a100-80g-pcie 4  2  300 1 32  ethernet-80g    1 880   8    | Azure NC A100 v4 page: NVLink joins pairs, no RDMA; Vidur's A100 testbed
h100-nvl-4              h100-pcie     4  2  300 1 64  ethernet-80g    1 640   8    | Vidur's H100 testbed: four H100 with NVLink in pairs (NVIDIA H100 PCIe datasheet)
h100-sxm-4              h100-sxm      4  4  450 1 64  connectx-7-400g 4 1024  14   | half an HGX board: four H100, every pair joined by NVLink
azure-nd96amsr-a100-v4  a100-80g      8  8  300 2 32  connectx-6-200g 8 1900  14   | Azure NDm A100 v4 page
azure-nd96isr-h100-v5   h100-sxm      8  8  450 1 64  connectx-7-400g 8 1900  14   | Azure ND H100 v5 page
aws-p4d.24xlarge        a100-40g      8  8  300 2 32  efa-100g        4 1152  16   | AWS P4 page
aws-p4de.24xlarge       a100-80g      8  8  300 2 32  efa-100g        4 1152  16   | AWS P4 page
aws-p5.48xlarge         h100-sxm      8  8  450 1 64  efa-100g       32 2048  28   | AWS P5 page
hgx-a100                a100-80g      8  8  300 2 32  connectx-6-200g 8 2048  14   | NVIDIA DGX A100 datasheet
hgx-h100                h100-sxm      8  8  450 1 64  connectx-7-400g 8 2048  28   | NVIDIA DGX H100 datasheet
hgx-h200                h200          8  8  450 1 64  connectx-7-400g 8 2048  28   | NVIDIA DGX H200 datasheet
hgx-b200                b200          8  8  900 1 64  connectx-7-400g 8 2048  28   | NVIDIA DGX B200 datasheet
hgx-b300                b300          8  8  900 1 128 connectx-8-800g 8 2048  28   | NVIDIA DGX B300 datasheet
gb200-nvl72             gb200         4  72 900 1 450 connectx-7-400g 4 960   28   | NVIDIA GB200 NVL72 datasheet: one compute tray; 18 trays share a domain
mi300x-8                mi300x        8  8  448 1 64  connectx-7-400g 8 2048  28   | AMD Instinct MI300X platform datasheet
blitz-cluster-a         a800-80g      8  8  200 2 32  roce-100g       8 1024  10   | BlitzScale, OSDI 2025, cluster A: 10 Gbps of SSD and 128 Gbps of host link a GPU
blitz-cluster-b         a100-80g-pcie 8  1  32  2 32  roce-100g       8 1024  10   | BlitzScale, OSDI 2025, cluster B: GPUs joined by PCIe only
aws-g5.48xlarge         a10g          8  1  32  1 32  ethernet-100g   1 768   7.6  | AWS G5 page
aws-g6.48xlarge         l4            8  1  32  1 32  ethernet-100g   1 768   7.6  | AWS G6 page
aws-g6e.48xlarge        l40s          8  1  32  1 32  efa-100g        4 1536  7.6  | AWS G6e page
rtx4090-workstation     rtx4090       2  1  32  1 32  ethernet-10g    1 128   7    | a desktop: NVIDIA disables peer-to-peer copies of these GPUs
"""  # noqa: E501

# name, Gbit/s, RDMA | source
_NICS = """
ethernet-10g    10   -    | IEEE 802.3ae
ethernet-25g    25   -    | IEEE 802.3by
ethernet-80g    80   -    | Azure NC A100 v4 page (80 Gbps of accelerated networking)
ethernet-100g   100  -    | IEEE 802.3ba
roce-100g       100  rdma | BlitzScale, OSDI 2025 (100 Gbps a GPU)
efa-100g        100  rdma | AWS Elastic Fabric Adapter, one interface
connectx-6-200g 200  rdma | NVIDIA ConnectX-6 datasheet
connectx-7-400g 400  rdma | NVIDIA ConnectX-7 datasheet
connectx-8-800g 800  rdma | NVIDIA ConnectX-8 datasheet
"""

# name, ports, Gbit/s a port, ns | source
_SWITCHES = """
quantum-qm8700  40  200 130 | NVIDIA Quantum QM8700 datasheet (HDR InfiniBand)
quantum-2       64  400 130 | NVIDIA Quantum-2 QM9700 datasheet (NDR InfiniBand)
quantum-x800    144 800 130 | NVIDIA Quantum-X800 Q3400 datasheet; latency taken as its predecessor's
spectrum-3      32  400 425 | NVIDIA Spectrum-3 SN4700 datasheet (Ethernet)
spectrum-4      64  800 700 | NVIDIA Spectrum-4 SN5600 datasheet (Ethernet); latency of the class
ethernet-100g   32  100 800 | an ordinary 100GbE leaf switch
"""

# name, GB/s, microseconds | source
_STORAGE = """
sata-ssd        0.55  100   | the limit of SATA at 6 Gbit/s
nvme-gen3       3.5   90    | four lanes of PCIe 3.0
nvme-gen4       7.0   80    | four lanes of PCIe 4.0
nvme-gen5       14.0  60    | four lanes of PCIe 5.0
nvme-raid-8     28.0  80    | eight PCIe 3.0 disks as in a DGX H100 (NVIDIA datasheet)
blitz-ssd       1.25  100   | BlitzScale, OSDI 2025 (10 Gbps a GPU)
aws-ebs-gp3     1.0   500   | AWS EBS gp3 page, the most a volume can be given
azure-premium-2 1.2   500   | Azure Premium SSD v2 page, the most a disk can be given
nfs-10g         1.25  1000  | a file server behind 10GbE
object-store    3.0   50000 | S3 and its like over 25GbE with many connections in parallel
"""


def _split(table: str) -> list[tuple[list[str], str]]:
    rows = (line.partition("|") for line in table.strip().splitlines())
    return [(figures.split(), source.strip()) for figures, _, source in rows]


def _node(figures: list[str], source: str) -> Node:
    name, gpu, gpus, domain, link, sharing, host, nic, nics, memory, ssd = figures
    return Node(
        name, gpu, int(gpus), int(domain), float(link) * _GIGA, int(sharing), float(host) * _GIGA, nic, int(nics),
        int(memory) * _GIB, float(ssd) * _GIGA, source,
    )  # fmt: skip


NODES = {figures[0]: _node(figures, source) for figures, source in _split(_NODES)}
NICS = {name: Nic(name, float(gbit) * _GBIT, rdma == "rdma", source) for (name, gbit, rdma), source in _split(_NICS)}
SWITCHES = {
    name: Switch(name, int(ports), float(gbit) * _GBIT, float(ns) * 1e-9, source)
    for (name, ports, gbit, ns), source in _split(_SWITCHES)
}
STORAGE = {name: Storage(name, float(gbs) * _GIGA, float(us) * 1e-6, source) for (name, gbs, us), source in _split(_STORAGE)}


def resolve_node(name: str) -> Node:
    """The node of that name. Raises ConfigError, with close matches, for an unknown one."""
    node = NODES.get(name.lower().replace("_", "-"))
    if node is None:
        close = difflib.get_close_matches(name.lower(), NODES, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join([*NODES][:5])}, ..."
        raise ConfigError(f"node {name!r} is unknown: {hint}")
    return node


def gpu_of(node: Node, tp: int = 1) -> Gpu:
    """The node's GPU, joined to others as it is there: by NVLink while `tp` of them fit into a domain, otherwise by PCIe."""
    gpu = resolve_gpu(node.gpu)
    if node.domain > 1 and tp <= node.domain:
        return replace(gpu, link="nvlink" if gpu.link == "pcie" else gpu.link, link_bandwidth=node.link_bandwidth)
    return replace(gpu, link="pcie", link_bandwidth=node.host_bandwidth)


def nic_bandwidth_per_gpu(node: Node) -> float:
    """Bytes a second and direction between nodes for each GPU, when all of them send at once."""
    return NICS[node.nic].bandwidth * node.num_nics / node.num_gpus
