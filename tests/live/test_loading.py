"""Orders for weights, one after the other: what has arrived stays, and who asked hears of the end once."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from squall.core.fleet_view import Place, Transfer
from squall.errors import ModelError, PeerLost, PeerRefused
from squall.live.loading import Arrived, Brought, Loads, Order, Whole
from squall.live.rpc.convert import WeightsMoved


class Ear:
    """See `Told`."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.moves: list[WeightsMoved] = []
        self.errors: list[Exception] = []
        self.ended = threading.Event()

    def arrived(self, num_layers: int) -> None:
        self.layers.append(num_layers)

    def loaded(self, moved: WeightsMoved) -> None:
        self.moves.append(moved)
        self.ended.set()

    def load_failed(self, error: Exception) -> None:
        self.errors.append(error)
        self.ended.set()


class Scripted:
    """A way that does with the source of an order what `script` says of it."""

    addresses: tuple[str, ...] = ()

    def __init__(self, script: dict[int, Callable[[threading.Event], None]]) -> None:
        self.script = script
        self.asked: list[int] = []
        self.begun = threading.Event()

    def forget(self) -> None:
        """Nothing is kept."""

    def prepare(self) -> None:
        """Nothing."""

    def bring(self, order: Order, over: threading.Event, arrived: Arrived, /) -> Brought:
        source = order.transfer.source.id
        self.asked.append(source)
        self.begun.set()
        arrived(source)
        self.script[source](over)
        return Brought(7)

    def cancel(self) -> None:
        """It waits for its event."""

    def close(self) -> None:
        """Nothing."""


def order(source: int, kind: str = "p2p") -> Order:
    return Order(9, Transfer("m", Place("gpu", source), (9,), kind), {})  # type: ignore[arg-type]


def lose(_: threading.Event) -> None:
    raise PeerLost("gone")


def refuse(_: threading.Event) -> None:
    raise PeerRefused("another model")


def until_over(over: threading.Event) -> None:
    assert over.wait(10)
    raise PeerLost("another order took its place")


def fine(_: threading.Event) -> None:
    """It comes at once."""


def test_a_load_that_lost_its_source_waits_for_another_order() -> None:
    way, ear = Scripted({1: lose, 2: fine}), Ear()
    loads = Loads(way)
    loads.order(order(1), ear)
    assert way.begun.wait(5)
    time.sleep(0.02)
    assert not ear.ended.is_set()
    loads.order(order(2, "chain"), ear)
    assert ear.ended.wait(5)
    assert (way.asked, ear.layers, ear.errors) == ([1, 2], [1, 2], [])
    assert [(moved.kind, moved.num_bytes) for moved in ear.moves] == [("chain", 7)]


def test_one_that_hears_of_no_other_fails() -> None:
    ear = Ear()
    Loads(Scripted({1: lose}), redirect_s=0.01).order(order(1), ear)
    assert ear.ended.wait(5)
    assert [str(error) for error in ear.errors] == ["gone"]


def test_a_refusal_is_the_end() -> None:
    ear = Ear()
    Loads(Scripted({1: refuse})).order(order(1), ear)
    assert ear.ended.wait(5)
    assert [str(error) for error in ear.errors] == ["another model"]


def test_a_new_order_ends_the_one_under_way() -> None:
    way, ear, later = Scripted({1: until_over, 2: fine}), Ear(), Ear()
    loads = Loads(way)
    loads.order(order(1), ear)
    assert way.begun.wait(5)
    loads.order(order(2), later)
    assert later.ended.wait(5)
    assert (way.asked, len(later.moves), ear.moves, ear.errors) == ([1, 2], 1, [], [])


def test_after_stop_nobody_is_told_and_the_next_head_may_ask() -> None:
    way, ear, next_ear = Scripted({1: until_over, 2: fine}), Ear(), Ear()
    loads = Loads(way)
    loads.order(order(1), ear)
    assert way.begun.wait(5)
    loads.stop()
    loads.order(order(2), next_ear)
    assert next_ear.ended.wait(5)
    assert not ear.ended.is_set()


def test_what_is_to_follow_a_stop_follows_once_nothing_is_on_its_way() -> None:
    way = Scripted({1: until_over})
    loads = Loads(way)
    loads.order(order(1), Ear())
    assert way.begun.wait(5)
    idle: SimpleQueue[bool] = SimpleQueue()
    loads.stop(lambda: idle.put(loads.idle))
    assert idle.get(timeout=5)
    loads.stop(lambda: idle.put(loads.idle))
    assert idle.get_nowait()


def test_what_is_to_follow_a_stop_does_not_where_another_order_comes_before() -> None:
    slow, followed = threading.Event(), threading.Event()

    def late(_: threading.Event) -> None:
        assert slow.wait(5)
        raise PeerLost("nobody wants it")

    way, ear = Scripted({1: late, 2: fine}), Ear()
    loads = Loads(way)
    loads.order(order(1), Ear())
    assert way.begun.wait(5)
    loads.stop(followed.set)
    loads.order(order(2), ear)
    slow.set()
    assert ear.ended.wait(5)
    while not loads.idle:
        time.sleep(0.001)
    assert not followed.is_set()


def test_an_engine_that_loads_itself_does_so_once() -> None:
    calls: list[int] = []
    way = Whole(lambda: calls.append(1))
    way.prepare()
    way.prepare()
    assert calls == [1]


def test_what_is_wrong_with_a_checkpoint_comes_out_as_it_is() -> None:
    def broken(_: threading.Event) -> None:
        raise ModelError("model.safetensors: truncated")

    ear = Ear()
    Loads(Scripted({1: broken})).order(order(1), ear)
    assert ear.ended.wait(5)
    assert isinstance(ear.errors[0], ModelError)
