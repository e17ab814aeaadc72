"""Pretended loads take what the simulator takes for the same transfer, undisturbed."""

import threading
from typing import Any

import pytest

from squall import config as configuration
from squall.core.fleet_view import STORE, Place, Transfer
from squall.core.types import SECOND
from squall.errors import TransferFailed
from squall.live.engine.build import accelerator
from squall.live.loading import Order
from squall.live.plan import served_plan
from squall.live.predicted_way import PredictedWay, Prices
from squall.live.served import served_model
from squall.perf.build import latency_model
from squall.sim.ground import ground

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=6", "cluster.nic_gbps=100",
    "cluster.ssd_gbps=80", "cluster.gpus_per_node=4", "fleet.replicas={min=1, max=12}",
)  # fmt: skip
TRANSFERS = [
    Transfer("m", Place("ssd", 0), (1,), "disk"),
    Transfer("m", STORE, (1,), "disk"),
    Transfer("m", Place("host", 0), (1,), "host"),
    Transfer("m", Place("host", 1), (1,), "host"),
    Transfer("m", Place("gpu", 0), (1,), "p2p"),
    Transfer("m", Place("gpu", 0), (4,), "p2p"),
    Transfer("m", Place("gpu", 0), (4, 8, 9), "chain"),
    Transfer("m", Place("gpu", 0), (1, 2), "chain"),
]


def prices(*more: str) -> tuple[Any, Any, Any]:
    config = configuration.load(None, (*SETTINGS, *more))
    model = served_model(config)
    return config, model, Prices.of(config, served_plan(config, model), accelerator(config))


def simulated(config: Any, model: Any, transfer: Transfer, replica: int) -> float:
    """Seconds, in the simulator's network with nothing else in it."""
    gpu = accelerator(config)
    latency = latency_model(config.latency, model.spec, gpu, config.replica)
    stands_on = ground(config, model.spec, gpu, latency, 1000)
    roads = stands_on.roads(stands_on.wires())
    assert roads is not None
    for each in transfer.path:
        roads.weights.load(each, transfer, 0)
    while (at := roads.network.next_end()) is not None:
        for found in roads.weights.on(roads.network.advance(at), at):
            if (found.replica, found.layer) == (replica, None):
                return found.at / SECOND
    raise AssertionError("it never came")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transfer", TRANSFERS, ids=lambda transfer: f"{transfer.kind} {transfer.source.kind} {transfer.path}")
def test_a_load_takes_what_it_takes_in_the_simulator(transfer: Transfer, tp: int) -> None:
    config, model, found = prices(f"replica.tp={tp}")
    for replica in transfer.path:
        assert found.seconds(replica, transfer) == pytest.approx(simulated(config, model, transfer, replica), rel=0.02)


def test_stripes_over_the_network_share_the_load() -> None:
    config, model, found = prices()
    transfer = Transfer("m", Place("gpu", 0), (4, 5), "striped", more_sources=(Place("gpu", 1),))
    whole = found.seconds(4, Transfer("m", Place("gpu", 0), (4,), "p2p"))
    assert found.seconds(4, transfer) == pytest.approx(whole / 2)
    assert found.seconds(4, transfer) == pytest.approx(simulated(config, model, transfer, 4), rel=0.02)


def order(settled: bool = False) -> Order:
    return Order(1, Transfer("m", Place("gpu", 0), (1,), "mock", seconds=0.2), {}, settled)


def test_layers_come_one_after_the_other_and_stay_when_another_order_comes() -> None:
    _, model, found = prices()
    loads: list[int] = []
    way = PredictedWay(lambda: loads.append(1), found)
    way.prepare()
    layers: list[int] = []
    over = threading.Event()

    def arrived(count: int) -> None:
        layers.append(count)
        if count == 5:
            over.set()

    with pytest.raises(TransferFailed):
        way.bring(order(), over, arrived)
    assert layers == [1, 2, 3, 4, 5]
    brought = way.bring(order(), threading.Event(), layers.append)
    assert layers == list(range(1, model.spec.num_layers + 1))
    assert 0 < brought.num_bytes < found.plan.weights.num_bytes
    assert way.bring(order(), threading.Event(), layers.append).num_bytes == 0
    assert loads == [1]


def test_a_settled_replica_has_its_weights_at_once() -> None:
    _, _, found = prices()
    layers: list[int] = []
    assert PredictedWay(lambda: None, found).bring(order(settled=True), threading.Event(), layers.append).num_bytes == 0
    assert layers == []
