"""Which replica of a transfer reads from which: a chain's predecessor, a stripe's giver. Knows addresses as words, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from squall.core.fleet_plan import Slots
from squall.core.fleet_view import Transfer
from squall.core.types import ReplicaId
from squall.live.loading import Order
from squall.live.transport.fetch import Source


def sources_of(order: Order, slots: Slots) -> tuple[list[Source], int]:
    """Whom a replica reads from, and in how many stripes: those of whom the order says where they are.

    In a chain its predecessor; those before that stand by. Of a striped transfer its own stripe from the source (or from the
    group before), the others from the replicas of its group; all sources stand by.
    """
    transfer, peers = order.transfer, order.peers
    first = [place.id for place in (transfer.source, *transfer.more_sources) if place.kind == "gpu"]
    if transfer.kind != "striped":
        path = transfer.path[: transfer.path.index(order.replica)]
        known = [peers[replica] for replica in (*reversed(path), *first) if replica in peers]
        return [Source(addresses, standby=at > 0) for at, addresses in enumerate(known)], 1
    there = [replica for replica in first if replica in peers]
    if not there:
        return [], len(first)
    lanes = enumerate(givers(order.replica, first, transfer.path, slots))
    striped = [Source(peers.get(giver, peers[there[0]]), stripe=lane) for lane, giver in lanes]  # every stripe has somebody
    return [*striped, *(Source(peers[replica], standby=True) for replica in there)], len(first)


def givers(replica: ReplicaId, sources: Sequence[ReplicaId], path: Sequence[ReplicaId], slots: Slots) -> list[ReplicaId]:
    """Of each stripe, who gives it to `replica`: as the simulator deals them out (`sim/weights.py`)."""
    before: Sequence[ReplicaId] = sources
    for _, members in groupby(path, key=slots.domain):
        group = list(members)
        if replica in group:
            owners = [group[lane % len(group)] for lane in range(len(sources))]
            return [before[lane % len(before)] if owner == replica else owner for lane, owner in enumerate(owners)]
        before = group
    raise ValueError(f"replica {replica} is not on the path {path}")


def needed(transfer: Transfer, replica: ReplicaId, slots: Slots) -> frozenset[ReplicaId]:
    """Targets of the same transfer that `replica` reads from: it cannot begin before it is known where they are."""
    if transfer.kind in ("disk", "host", "mock"):
        return frozenset()
    if transfer.kind == "striped":
        sources = [place.id for place in (transfer.source, *transfer.more_sources)]
        return frozenset(givers(replica, sources, transfer.path, slots)).intersection(transfer.path)
    at = transfer.path.index(replica)
    return frozenset(transfer.path[at - 1 : at]) if at else frozenset()
