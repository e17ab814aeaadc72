"""Weights from replicas that have them: one to one, along a chain, or in stripes."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from squall.core.fleet_view import LoadView, Place, SlotView, SourceView, Transfer
from squall.core.types import ReplicaId
from squall.policies.load.partners import tail_last, with_partners
from squall.policies.load.storage import from_storage


class P2p(Struct, frozen=True, tag_field="kind", tag="p2p", forbid_unknown_fields=True):
    """Every target from a replica of its own choice: in its NVLink domain, else the least busy one, preferably under its leaf.

    More targets than sources share sources, and their links. Without a source it is host memory, then disk.

    Attributes:
        avoid_kv: spare sources whose network link carries KV the same way, as long as there are others.
    """

    avoid_kv: bool = True
    live: bool = False

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        sending: Counter[ReplicaId] = Counter({source.replica: source.num_sending for source in view.sources})
        transfers = []
        for target in view.targets:
            source = nearest(view.sources, target, sending, self.avoid_kv)
            if source is None:
                transfers.append(from_storage(view, target))
                continue
            sending[source.replica] += 1
            transfers.append(Transfer(view.model, Place("gpu", source.replica), (target.replica,), "p2p"))
        return with_partners(view, transfers, self.live)


class Chain(Struct, frozen=True, tag_field="kind", tag="chain", forbid_unknown_fields=True):
    """One chain from one source through all targets, faster links first: as long as a single transfer, whatever their number.

    Attributes:
        avoid_kv: see `p2p`.
    """

    avoid_kv: bool = True
    live: bool = False

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        sources = without_kv(view.sources, self.avoid_kv)
        if not sources:
            return with_partners(view, [from_storage(view, target) for target in view.targets], self.live)
        source = min(sources, key=busyness)
        path = tuple(target.replica for target in tail_last(view.targets))
        return with_partners(view, [one_chain(view, Place("gpu", source.replica), path)], self.live)


class Striped(Struct, frozen=True, tag_field="kind", tag="striped", forbid_unknown_fields=True):
    """Each source sends its stripe down the NVLink domains of the targets, and in each domain they exchange stripes.

    As many stripes as there are sources, and replicas in the largest domain to be loaded; with one it is a chain. (The rows and
    all-gathers of BlitzScale's multi-lane broadcast; there all domains must offer as many replicas as there are lanes.)

    Attributes:
        avoid_kv: see `p2p`.
    """

    avoid_kv: bool = True
    live: bool = False

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        sources = sorted(without_kv(view.sources, self.avoid_kv), key=busyness)
        if not sources:
            return with_partners(view, [from_storage(view, target) for target in view.targets], self.live)
        groups = by_domain(view.targets)
        lanes = min(len(sources), max(len(group) for group in groups))
        path = tuple(target.replica for group in groups for target in group)
        return with_partners(view, [in_stripes(view, sources[:lanes], path)], self.live)


# -- what `auto` uses, too


def one_chain(view: LoadView, source: Place, path: tuple[ReplicaId, ...]) -> Transfer:
    """A chain; of one hop it is called by that name."""
    if len(path) > 1:
        return Transfer(view.model, source, path, "chain")
    return Transfer(view.model, source, path, "p2p" if source.kind == "gpu" else "host")


def in_stripes(view: LoadView, sources: Sequence[SourceView], path: tuple[ReplicaId, ...]) -> Transfer:
    """One stripe a source; of one stripe it is a chain."""
    first, *others = (Place("gpu", source.replica) for source in sources)
    if not others:
        return one_chain(view, first, path)
    return Transfer(view.model, first, path, "striped", more_sources=tuple(others))


def by_domain(targets: Sequence[SlotView]) -> list[list[SlotView]]:
    """Targets that NVLink joins, those with the most network bandwidth together first."""
    groups: dict[int, list[SlotView]] = {}
    for target in targets:
        groups.setdefault(target.domain, []).append(target)
    fastest_first = sorted(groups.items(), key=lambda group: (-sum(slot.nic_bytes_per_s for slot in group[1]), group[0]))
    return [tail_last(group) for _, group in fastest_first]


def without_kv(sources: Sequence[SourceView], avoid_kv: bool) -> Sequence[SourceView]:
    """Sources whose network link carries no KV the same way; all of them where there is no such, or nobody cares."""
    spared = [source for source in sources if not source.sends_kv]
    return spared if avoid_kv and spared else sources


def busyness(source: SourceView) -> tuple[bool, int, float, int, ReplicaId]:
    """The first of these is the best to send from."""
    return source.sends_kv, source.num_sending, -source.nic_bytes_per_s, source.num_outstanding, source.replica


def nearest(
    sources: Sequence[SourceView], target: SlotView, sending: Counter[ReplicaId], avoid_kv: bool
) -> SourceView | None:  # fmt: skip
    """In the target's domain, whatever else it sends over the network; else spared, least busy, and under the same leaf."""
    inside = [source for source in sources if source.domain == target.domain]
    candidates = inside or without_kv(sources, avoid_kv)
    return min(candidates, key=lambda at: (sending[at.replica], at.leaf != target.leaf, busyness(at)), default=None)
