import pytest

from squall.errors import ConfigError
from squall.perf.hardware import GPUS
from squall.perf.topology import NICS, NODES, STORAGE, SWITCHES, gpu_of, nic_bandwidth_per_gpu, resolve_node


def test_every_row_names_known_parts_and_a_source() -> None:
    for node in NODES.values():
        assert node.gpu in GPUS
        assert node.nic in NICS
        assert node.source
        assert node.domain == 1 or node.domain % 2 == 0
    sources = [nic.source for nic in NICS.values()] + [switch.source for switch in SWITCHES.values()]
    assert all(sources)
    assert all(storage.source and storage.read_bandwidth > 0 for storage in STORAGE.values())


def test_the_a100_testbed_joins_pairs_by_nvlink_and_the_rest_by_pcie() -> None:
    node = resolve_node("azure-nc96ads-a100-v4")
    assert (node.num_gpus, node.gpu) == (4, "a100-80g-pcie")
    pair, four = gpu_of(node, 2), gpu_of(node, 4)
    assert (pair.link, pair.link_bandwidth) == ("nvlink", 300e9)
    assert (four.link, four.link_bandwidth) == ("pcie", 32e9)


def test_four_h100_are_joined_by_nvlink_all_together() -> None:
    gpu = gpu_of(resolve_node("h100-sxm-4"), 4)
    assert (gpu.link, gpu.link_bandwidth) == ("nvlink", 450e9)


def test_blitzscales_clusters_are_as_in_its_paper() -> None:
    a, b = resolve_node("blitz-cluster-a"), resolve_node("blitz-cluster-b")
    gbit = 1e9 / 8
    assert nic_bandwidth_per_gpu(a) == nic_bandwidth_per_gpu(b) == 100 * gbit
    assert a.link_bandwidth == 1600 * gbit
    assert a.host_bandwidth / a.gpus_per_host_link == 128 * gbit
    assert a.ssd_bandwidth / a.num_gpus == 10 * gbit == STORAGE["blitz-ssd"].read_bandwidth
    assert b.domain == 1
    assert gpu_of(b, 2).link_bandwidth == 256 * gbit


def test_an_unknown_node_lists_close_matches() -> None:
    with pytest.raises(ConfigError, match=r"node 'hgx-h1000' is unknown: did you mean hgx-h"):
        resolve_node("hgx-h1000")


def test_where_no_name_is_close_some_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^node 'zzz' is unknown: known are (\S+, ){5}\.\.\.$"):
        resolve_node("zzz")
