"""Who fetches what from whom when one model goes to many: chains and stripes as lists of sources. Knows names, no sockets.

A chain takes about size / bandwidth, whatever its length: a member passes a chunk on as soon as it has it. With several
sources and hosts of several receivers, every receiver of a host fetches one stripe over the network and the others' stripes
from its neighbours (BlitzScale's multi-lane rows with an all-gather inside each host).
"""

from collections.abc import Mapping, Sequence

from squall.live.transport.fetch import Source

Addresses = Mapping[str, tuple[str, ...]]
"""Where each node can be reached, the best way first."""


def chains(sources: Sequence[str], receivers: Sequence[str], addresses: Addresses) -> dict[str, list[Source]]:
    """Receivers dealt out over the sources, one chain each, in the order given.

    Returns:
        For each receiver its predecessor and, standing by, those before it up to the source, and the other sources.
    """
    plan: dict[str, list[Source]] = {}
    for lane, source in enumerate(sources):
        before = [source]
        for receiver in receivers[lane :: len(sources)]:
            others = [other for other in sources if other != source]
            plan[receiver] = _plan(before[::-1], others, addresses)
            before.append(receiver)
    return plan


def striped(sources: Sequence[str], hosts: Sequence[Sequence[str]], addresses: Addresses) -> dict[str, list[Source]]:
    """One stripe a source; stripe i goes down the i-th receivers of all hosts, which hand it to their neighbours.

    Args:
        hosts: the receivers of each host, as many as there are sources.

    Returns:
        For each receiver its sources; `Fetch(stripes=len(sources))`. Every source stands by.

    Raises ValueError for a host of another size.
    """
    plan: dict[str, list[Source]] = {}
    before = list(sources)
    for host in hosts:
        if len(host) != len(sources):
            raise ValueError(f"{len(sources)} stripes need as many receivers on every host, not {len(host)}")
        for lane, receiver in enumerate(host):
            own = Source(addresses[before[lane]], stripe=lane)
            neighbours = [Source(addresses[other], stripe=at) for at, other in enumerate(host) if at != lane]
            plan[receiver] = [own, *neighbours, *(Source(addresses[source], standby=True) for source in sources)]
        before = list(host)
    return plan


def _plan(nearest_first: Sequence[str], others: Sequence[str], addresses: Addresses) -> list[Source]:
    first, *rest = nearest_first
    return [Source(addresses[first]), *(Source(addresses[node], standby=True) for node in [*rest, *others])]
