"""Who reads from whom, written by hand."""

from typing import Any

import pytest

from squall.core.fleet_plan import Slots
from squall.core.fleet_view import Place, Transfer
from squall.live.loading import Order
from squall.live.transfers import givers, needed, sources_of
from squall.live.transport.fetch import Source

PAIRS = Slots(8, per_node=8, per_domain=2)


def at(replica: int) -> tuple[str, ...]:
    return (f"shm://{replica}",)


def order(replica: int, path: tuple[int, ...], sources: tuple[int, ...] = (0,), kind: Any = "chain", known: Any = None) -> Order:
    first, *more = (Place("gpu", source) for source in sources)
    transfer = Transfer("m", first, path, kind, more_sources=tuple(more))
    peers = {id: at(id) for id in (*sources, *path) if id != replica and (known is None or id in known)}
    return Order(replica, transfer, peers)


def test_in_a_chain_everybody_reads_from_whoever_comes_before_and_falls_back_on_those_before_that() -> None:
    path = (3, 4, 5)
    assert sources_of(order(3, path), PAIRS) == ([Source(at(0))], 1)
    assert sources_of(order(5, path), PAIRS) == (
        [Source(at(4)), Source(at(3), standby=True), Source(at(0), standby=True)],
        1,
    )
    assert sources_of(order(5, path, known={0}), PAIRS) == ([Source(at(0))], 1)
    assert sources_of(order(3, path, known=()), PAIRS) == ([], 1)


def test_stripes_go_down_the_groups_whose_members_exchange_them() -> None:
    path = (2, 3, 4, 5)
    assert givers(2, (0, 1), path, PAIRS) == [0, 3]
    assert givers(3, (0, 1), path, PAIRS) == [2, 1]
    assert givers(4, (0, 1), path, PAIRS) == [2, 5]
    assert givers(5, (0, 1), path, PAIRS) == [4, 3]
    found, stripes = sources_of(order(4, path, (0, 1), "striped"), PAIRS)
    assert stripes == 2
    assert found == [
        Source(at(2), stripe=0),
        Source(at(5), stripe=1),
        Source(at(0), standby=True),
        Source(at(1), standby=True),
    ]


def test_a_stripe_whose_giver_cannot_be_reached_comes_from_a_source() -> None:
    found, _ = sources_of(order(4, (2, 3, 4, 5), (0, 1), "striped", known={1, 5}), PAIRS)
    assert found[:2] == [Source(at(1), stripe=0), Source(at(5), stripe=1)]


@pytest.mark.parametrize(
    ("replica", "kind", "others"),
    [(3, "chain", set()), (4, "chain", {3}), (5, "chain", {4}), (4, "striped", {5}), (3, "disk", set()), (3, "p2p", set())],
)
def test_a_load_begins_when_it_is_known_where_its_givers_are(replica: int, kind: str, others: set[int]) -> None:
    path = (replica,) if kind in ("disk", "p2p") else (4, 5) if kind == "striped" else (3, 4, 5)
    assert needed(order(replica, path, (0, 1) if kind == "striped" else (0,), kind).transfer, replica, PAIRS) == others
