"""The links of real machines, and how long weights take over them when nothing else moves."""

import itertools

import pytest

from squall.config import from_tree
from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.topology import NODES, resolve_node
from squall.sim.fabric import Fabric, Path
from squall.sim.ground import ground
from squall.sim.network import Network
from squall.sim.prepare import prepare

A, B = resolve_node("blitz-cluster-a"), resolve_node("blitz-cluster-b")


def took(fabric: Fabric, paths: list[Path], num_bytes: int) -> float:
    """Seconds until all have come, when all begin at once."""
    network = Network(fabric.links)
    for flow, path in enumerate(paths):
        network.start(flow, path, num_bytes, 0)
    last = 0
    while (due := network.next_end()) is not None:
        network.advance(due)
        last = due
    return last / SECOND


@pytest.mark.parametrize(
    ("gigabytes", "gpus", "ssd", "host", "rdma"), [(16, 1, 12.8, 1.0, 1.28), (24, 2, 19.2, 1.5, 1.92), (36, 4, 28.8, 2.25, 2.88)]
)
def test_ideal_load_times_of_the_papers_clusters(gigabytes: int, gpus: int, ssd: float, host: float, rdma: float) -> None:
    """8B, 24B on two GPUs and 72B on four: gigabytes a GPU. Two GPUs share a host link: each has 128 Gbps when both load."""
    for fabric in (Fabric(A, num_nodes=4), Fabric(B, num_nodes=2)):
        used = range(max(gpus, 2))
        size = gigabytes * 10**9
        assert took(fabric, [fabric.ssd_to_gpu(gpu) for gpu in range(gpus)], size) == pytest.approx(ssd, rel=0.02)
        assert took(fabric, [fabric.ssd_to_gpu(gpu) for gpu in range(8)], size) == pytest.approx(ssd, rel=0.02)
        assert took(fabric, [fabric.host_to_gpu(0, gpu) for gpu in used], size) == pytest.approx(host, rel=0.02)
        assert took(fabric, [fabric.gpu_to_gpu(8 + gpu, gpu) for gpu in range(gpus)], size) == pytest.approx(rdma, rel=0.02)
        assert took(fabric, [fabric.host_to_gpu(1, gpu) for gpu in range(gpus)], size) == pytest.approx(rdma, rel=0.02)


def test_an_nvlink_domain_is_filled_in_a_tenth_of_a_second() -> None:
    fabric = Fabric(A)
    network = Network(fabric.links)
    for hop in range(7):
        network.start(hop, fabric.gpu_to_gpu(hop, hop + 1), 16 * 10**9, 0, after=hop - 1 if hop else None, chunk=16 << 20)
    last = 0
    while (due := network.next_end()) is not None:
        network.advance(due)
        last = due
    assert last / SECOND < 0.12  # the paper: 120 ms at most


def test_paths_of_cluster_a() -> None:
    fabric = Fabric(A, num_nodes=4, nodes_per_leaf=2)
    assert fabric.gpu_to_gpu(3, 3) == ()
    assert fabric.gpu_to_gpu(0, 7) == ("gpu0.nvlink.out", "gpu7.nvlink.in")
    assert fabric.gpu_to_gpu(0, 9) == ("gpu0.pcie.out", "node0.nic0.out", "node1.nic1.in", "gpu9.pcie.in")
    assert fabric.gpu_to_gpu(0, 17) == (
        "gpu0.pcie.out",
        "node0.nic0.out",
        "leaf0.up",
        "leaf1.down",
        "node2.nic1.in",
        "gpu17.pcie.in",
    )
    assert fabric.host_to_gpu(0, 3) == ("node0.host1.down", "gpu3.pcie.in")
    assert fabric.host_to_gpu(1, 3) == ("node1.host1.down", "node1.nic3.out", "node0.nic3.in", "gpu3.pcie.in")
    assert fabric.ssd_to_gpu(9) == ("node1.ssd", "gpu9.ssd", "node1.host0.down", "gpu9.pcie.in")
    assert fabric.store_to_gpu(9) == ("node1.store", "node1.host0.down", "gpu9.pcie.in")


def test_without_nvlink_gpus_of_a_node_meet_at_a_switch_or_at_the_host() -> None:
    fabric = Fabric(B)
    assert fabric.gpu_to_gpu(0, 1) == ("gpu0.pcie.out", "gpu1.pcie.in")
    assert fabric.gpu_to_gpu(0, 2) == ("gpu0.pcie.out", "node0.host0.up", "node0.host1.down", "gpu2.pcie.in")


def test_domains_may_be_pairs_or_several_nodes() -> None:
    pairs = Fabric(resolve_node("azure-nc96ads-a100-v4"), num_nodes=2)
    assert [pairs.domain_of(gpu) for gpu in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pairs.gpu_to_gpu(0, 1) == ("gpu0.nvlink.out", "gpu1.nvlink.in")
    assert pairs.gpu_to_gpu(1, 2) == ("gpu1.pcie.out", "gpu2.pcie.in")
    assert pairs.nic_of(3) == pairs.nic_of(0) == "node0.nic0"  # one card for four GPUs
    rack = Fabric(resolve_node("gb200-nvl72"), num_nodes=19)
    assert rack.domain_of(71) == 0
    assert rack.domain_of(72) == 1
    assert rack.gpu_to_gpu(0, 71) == ("gpu0.nvlink.out", "gpu71.nvlink.in")


def test_more_cards_than_gpus_count_as_one_for_each() -> None:
    fabric = Fabric(resolve_node("aws-p5.48xlarge"))
    assert fabric.nic_bytes_per_s == 4 * 100e9 / 8
    assert fabric.nic_of(7) == "node0.nic7"


def test_uplinks_may_be_oversubscribed() -> None:
    fabric = Fabric(A, num_nodes=4, nodes_per_leaf=2, oversubscription=4)
    assert fabric.links["leaf0.up"] == 2 * 8 * 12.5e9 / 4
    inside = [fabric.gpu_to_gpu(gpu, 8 + gpu) for gpu in range(8)]
    across = [fabric.gpu_to_gpu(gpu, 16 + gpu) for gpu in range(16)]
    assert took(fabric, inside, 10**9) == pytest.approx(0.08)
    assert took(fabric, across, 10**9) == pytest.approx(0.32)


def test_uplinks_of_a_configuration_are_as_wide_as_what_is_below_them_and_no_wider() -> None:
    """Given NICs, too: they were given to the nodes alone, and the catalogue's slower ones stayed above them."""
    tables = {"gpu": "a800-80g", "node": "blitz-cluster-a", "nodes": 4, "nodes_per_leaf": 2, "nic_gbps": 400}

    def uplink(**more: object) -> float:
        config = from_tree("here", {"cluster": {**tables, **more}, "fleet": {"replicas": {"min": 1, "max": 4}}})
        model, gpu = resolve_model("llama-3-8b"), resolve_gpu("a800-80g")
        links = ground(config, model, gpu, prepare(config, model, gpu)[0], 100).links
        assert links["node0.nic0.out"] == 400e9 / 8
        return links["leaf0.up"]

    assert uplink() == pytest.approx(2 * 8 * 400e9 / 8)
    assert uplink(oversubscription=4) == pytest.approx(2 * 2 * 400e9 / 8)


def test_limits_can_be_given() -> None:
    assert Fabric(A, ssd_per_gpu=5e9).ssd_bytes_per_s == 5e9
    assert Fabric(A, ssd_per_gpu=1e12).ssd_bytes_per_s == A.ssd_bandwidth
    narrow = Fabric(A, dram_per_node=8e9)
    assert narrow.host_to_gpu(0, 0)[0] == "node0.dram"
    assert took(narrow, [narrow.host_to_gpu(0, gpu) for gpu in range(8)], 10**9) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(NODES))
def test_every_path_of_every_machine_is_made_of_its_links_each_once(name: str) -> None:
    fabric = Fabric(NODES[name], num_nodes=3, nodes_per_leaf=2)
    links, gpus = fabric.links, (0, 1, NODES[name].num_gpus - 1, fabric.num_gpus - 1)
    paths = [fabric.gpu_to_gpu(source, target) for source, target in itertools.product(gpus, repeat=2)]
    for gpu in gpus:
        paths += [fabric.store_to_gpu(gpu)] + [fabric.host_to_gpu(node, gpu) for node in range(3)]
        paths += [fabric.ssd_to_gpu(gpu)] if NODES[name].ssd_bandwidth else []
    for path in paths:
        assert len(set(path)) == len(path)
        assert all(links[link] > 0 for link in path)
    assert all(bandwidth > 0 for bandwidth in links.values())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_nodes": 0}, "num_nodes must be at least 1"),
        ({"nodes_per_leaf": 0}, "nodes_per_leaf must be at least 1"),
        ({"oversubscription": 0.5}, "oversubscription must be at least 1"),
        ({"ssd_per_gpu": 0}, "ssd_per_gpu must be above 0"),
        ({"store": "tape"}, "storage 'tape' is unknown: one of sata-ssd"),
    ],
)
def test_what_cannot_be_built_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fabric(A, **keys)  # type: ignore[arg-type]
