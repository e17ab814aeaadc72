"""Weights by the shortest ways that there are: BlitzScale's greedy planner in three steps (OSDI 2025, section 5.1).

Knows where replicas are, how fast their links are and which of them carry KV; not what else is on these links.
"""

from collections.abc import Sequence

from msgspec import Struct, field

from squall.core.fleet_view import LoadView, Place, SlotView, SourceView, Transfer
from squall.policies.load.partners import tail_last, with_partners
from squall.policies.load.peers import busyness, by_domain, in_stripes, one_chain, without_kv
from squall.policies.load.storage import from_storage


class Seed(Struct):
    """Where a chain begins, and the groups that it goes through."""

    places: list[Place]
    sources: list[SourceView]
    leaves: set[int]
    groups: list[list[SlotView]] = field(default_factory=list)

    @property
    def num_targets(self) -> int:
        return sum(len(group) for group in self.groups)


class Auto(Struct, frozen=True, tag_field="kind", tag="auto", forbid_unknown_fields=True):
    """Whoever shares an NVLink domain with a source gets its weights there; the others over the network, in chains:

    1. sources whose link carries KV the same way are spared, as long as there are others or copies in host memory;
    2. targets are grouped by NVLink domain, the group with the most bandwidth first;
    3. group after group is attached to a chain that is under its leaf already, of those to the shortest.

    Several sources in one domain begin one chain of several stripes, where there are domains of several targets to receive
    them. A host copy beside a source begins no chain: both would leave by the same NICs. Without a source weights come from host
    memory, then from disk, whichever is faster.

    Attributes:
        stripe: see above; otherwise every source begins a chain of its own.
        pinned: one copy of the model is kept in host memory: where the last one is lost with its node, the node of another
            replica makes one (BlitzScale's parameter pool).
        live: the last target of each chain relieves an overloaded replica while it loads.
    """

    stripe: bool = True
    pinned: bool = True
    live: bool = False

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        transfers, groups = self._inside(view)
        seeds = self._seeds(view, groups) if groups else []
        if not seeds:
            transfers += [from_storage(view, target) for group in groups for target in group]
            return with_partners(view, transfers, self.live)
        for group in groups:
            leaf = group[0].leaf
            seed = min(seeds, key=lambda seed: (leaf not in seed.leaves, seed.num_targets))
            seed.groups.append(group)
            seed.leaves.add(leaf)
        transfers += [self._chain(view, seed) for seed in seeds if seed.groups]
        return with_partners(view, transfers, self.live)

    def _inside(self, view: LoadView) -> tuple[list[Transfer], list[list[SlotView]]]:
        """Chains over NVLink, and the groups in whose domains nobody has the weights."""
        transfers, others = [], []
        for group in by_domain(view.targets):
            inside = [source for source in view.sources if source.domain == group[0].domain]
            if inside:
                source = min(inside, key=lambda source: (source.num_sending, source.num_outstanding, source.replica))
                path = tuple(target.replica for target in group)
                transfers.append(one_chain(view, Place("gpu", source.replica), path))
            else:
                others.append(group)
        return transfers, others

    def _seeds(self, view: LoadView, groups: Sequence[Sequence[SlotView]]) -> list[Seed]:
        """Spared replicas, the least busy first, then copies in host memory; busy replicas only where there is neither."""
        leaf_of = {slot.node: slot.leaf for slot in (*view.sources, *view.targets)}
        hosts = [
            Seed([Place("host", node)], [], {leaf_of[node]} if node in leaf_of else set()) for node in sorted(view.host_copies)
        ]
        sources = [source for source in view.sources if not source.sends_kv]
        if not sources and not hosts:
            sources = list(without_kv(view.sources, avoid_kv=True))
        together: dict[int, list[SourceView]] = {}
        wide = self.stripe and any(len(group) > 1 for group in groups)
        for source in sorted(sources, key=busyness):
            together.setdefault(source.domain if wide else source.replica, []).append(source)
        taken = {source.node for source in sources}  # the same NICs: a copy there adds nothing, and slows its neighbours down
        return [
            Seed([Place("gpu", source.replica) for source in begin], begin, {begin[0].leaf}) for begin in together.values()
        ] + [host for host in hosts if host.places[0].id not in taken]  # fmt: skip

    def _chain(self, view: LoadView, seed: Seed) -> Transfer:
        """Through its groups, fastest first as they were attached; several stripes as far as its first group can take them."""
        last = tail_last(seed.groups[-1])
        path = tuple(target.replica for group in (*seed.groups[:-1], last) for target in group)
        lanes = min(len(seed.sources), max(len(group) for group in seed.groups))
        return in_stripes(view, seed.sources[:lanes], path) if lanes > 1 else one_chain(view, seed.places[0], path)
