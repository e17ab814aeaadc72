"""What a head hears of its replica's weights: once that they are here, whatever crosses with that."""

import asyncio
import time
from types import SimpleNamespace
from typing import cast

from squall.core.events import Event, WeightsLoaded
from squall.core.fleet_view import Place, Transfer
from squall.live.arrival import Arrival
from squall.live.errands import Errands
from squall.live.host import EngineThread, Host
from squall.live.loading import Loads, Order, Whole
from squall.live.rpc.convert import WeightsMoved

REPLICA = 9


def test_an_order_that_crosses_with_the_end_brings_no_second_one() -> None:
    told: list[Event] = []
    moved: list[WeightsMoved] = []

    async def session() -> None:
        loads = Loads(Whole(lambda: None))
        host = SimpleNamespace(replica=REPLICA, engine=SimpleNamespace(num_blocks=100, block_size=16), loads=loads)
        arrival = Arrival(cast(Host, host), Errands(EngineThread("unused")), False, told.append, moved.append)
        for source in (1, 2):  # the second one is here before the loop has heard how the first one ended
            loads.order(Order(REPLICA, Transfer("m", Place("gpu", source), (REPLICA,), "p2p"), {}), arrival)
            until = time.monotonic() + 10
            while not loads.idle and time.monotonic() < until:
                time.sleep(0.001)
        await asyncio.sleep(0)

    asyncio.run(session())
    assert told == [WeightsLoaded(REPLICA, 100, 16)]
    assert len(moved) == 1
