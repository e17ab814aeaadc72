"""What one replica of a fleet can do, worked out: how long weights take follows the way that [load] brings them."""

import pytest

from squall.config import Cluster, Config, Model
from squall.deployment import full_plan
from squall.fleet_tables import Capacities, Fleet, Replicas, Startup
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.load import Auto, Chain, Disk, Host, Load, Mock, P2p, Striped
from squall.sim.prepare import prepare

GB = 16.0605  # of Llama 3.1 8B in bf16


def load_s(load: Load, minimum: int = 1, **tables: object) -> float:
    config = Config(
        model=Model(name="meta-llama/Llama-3.1-8B"),
        cluster=Cluster(gpu="h100-sxm", nic_gbps=100, host_gbps=256, ssd_gbps=80),  # 12.5, 32 and 10 GB/s, eight GPUs to a disk
        fleet=Fleet(replicas=Replicas(minimum, 4, 1)),
        load=load,
        **tables,  # type: ignore[arg-type]
    )
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    latency, num_blocks = prepare(config, model, gpu)
    capacity = full_plan(config, model, gpu, latency, num_blocks).capacity
    assert capacity is not None
    return capacity.load_s


@pytest.mark.parametrize(
    ("load", "expected_s"),
    [
        (Disk(), GB / 10 * 8),
        (Host(), GB / 10 * 8),  # a node that never had the weights has no copy
        (Host(cache="all_hit"), GB / 32),
        (P2p(), GB / 12.5),
        (Chain(), GB / 12.5),
        (Striped(), GB / 12.5),
        (Auto(), GB / 12.5),
        (Mock(load_s=0.25), 0.25),
    ],
)
def test_a_load_takes_what_its_way_takes(load: Load, expected_s: float) -> None:
    assert load_s(load) == pytest.approx(expected_s, rel=1e-3)


def test_in_a_fleet_that_may_be_empty_nobody_may_be_there_to_send() -> None:
    assert load_s(Chain(), minimum=0) == pytest.approx(GB / 10 * 8, rel=1e-3)


def test_phases_are_added_and_what_is_given_counts() -> None:
    assert load_s(Mock(load_s=1.0), startup=Startup(cold=True)) == pytest.approx(1 + 10.5 + 3)
    assert load_s(Chain(), capacity=Capacities(load_s=7.0)) == 7.0
