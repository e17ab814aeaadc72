"""Weights from what a node has itself: its disk, or a copy in its memory. No other replica is asked."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from squall.core.fleet_view import STORE, LoadView, Place, SlotView, Transfer
from squall.core.types import SECOND
from squall.policies.load.partners import with_partners


class Disk(Struct, frozen=True, tag_field="kind", tag="disk", forbid_unknown_fields=True):
    """Every replica reads from its node's own disk, or from the store where that has no copy."""

    live: bool = False

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        return with_partners(view, [from_disk(view, target) for target in view.targets], self.live)


class Host(Struct, frozen=True, tag_field="kind", tag="host", forbid_unknown_fields=True):
    """From the copy in the node's memory where there is one, otherwise as `disk` does (ServerlessLLM's way).

    Attributes:
        cache: "replace": there is a copy while a replica on the node has the weights, and `ttl_s` after the last use. "lru": it
            stays until the memory is needed for another model. "all_hit": there always is one (the paper's AllCache).
            "all_miss": there never is.
        ttl_s: see above. (BlitzScale's runs used 30 s, its study of caches five minutes.)
    """

    cache: Literal["replace", "lru", "all_hit", "all_miss"] = "replace"
    ttl_s: float = 300.0
    live: bool = False

    def __post_init__(self) -> None:
        if not self.ttl_s > 0:
            raise ValueError(f'ttl_s must be above 0, not {self.ttl_s}; without a cache say cache = "all_miss"')

    @property
    def host_ttl_s(self) -> float | None:
        """How long the controller has to remember an unused copy; None: for ever."""
        return self.ttl_s if self.cache == "replace" else None

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        transfers = [
            from_host(view, target.node, target) if self._hits(view, target.node) else from_disk(view, target)
            for target in view.targets
        ]
        return with_partners(view, transfers, self.live)

    def _hits(self, view: LoadView, node: int) -> bool:
        match self.cache:
            case "all_hit":
                return True
            case "all_miss":
                return False
            case "lru":
                return node in view.host_copies
        used_at = view.host_copies.get(node)
        if used_at is None:
            return False
        in_use = any(source.node == node for source in view.sources)
        return in_use or view.now - used_at < self.ttl_s * SECOND


class Mock(Struct, frozen=True, tag_field="kind", tag="mock", forbid_unknown_fields=True):
    """Every load takes `load_s`, whatever moves, and none disturbs another: the one delay by which others model an instance."""

    load_s: float = 1.0
    live: bool = False

    def __post_init__(self) -> None:
        if not self.load_s > 0:
            raise ValueError(f"load_s must be above 0, not {self.load_s}")

    def __call__(self, view: LoadView) -> Sequence[Transfer]:
        transfers = [Transfer(view.model, STORE, (target.replica,), "mock", seconds=self.load_s) for target in view.targets]
        return with_partners(view, transfers, self.live)


def from_disk(view: LoadView, target: SlotView) -> Transfer:
    """Its own node's, or else the store."""
    source = Place("ssd", target.node) if target.node in view.ssd_copies else STORE
    return Transfer(view.model, source, (target.replica,), "disk")


def from_host(view: LoadView, node: int, target: SlotView) -> Transfer:
    """Out of a node's memory, over the network where that is another one."""
    return Transfer(view.model, Place("host", node), (target.replica,), "host")


def from_storage(view: LoadView, target: SlotView) -> Transfer:
    """The nearest copy that is no replica: its own node's memory, another's where the network is faster than the disk, a disk."""
    if target.node in view.host_copies:
        return from_host(view, target.node, target)
    disk = view.ssd_bytes_per_s if target.node in view.ssd_copies else view.store_bytes_per_s
    if view.host_copies and min(target.nic_bytes_per_s, view.host_bytes_per_s) > disk:
        return from_host(view, min(view.host_copies), target)
    return from_disk(view, target)
