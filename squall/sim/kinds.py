"""The kinds of replicas in a fleet whose replicas are not alike: of each what prices its steps, and its KV pool.

Knows which part makes what. Which replica is of which kind, `squall.pools` says: they are numbered in the order of the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from squall.config import Config
from squall.errors import ConfigError
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec
from squall.pools import alike
from squall.sim.prepare import prepare


class Kind(Struct, frozen=True):
    """Replicas that are alike.

    Attributes:
        config: of a fleet of nothing else.
        latency: prices their steps.
        num_blocks: KV blocks of each.
    """

    config: Config
    latency: LatencyModel
    num_blocks: int


def kinds_of(config: Config, model: ModelSpec) -> list[Kind]:
    """A kind for each of `[[fleet.pools]]`; none where there are no pools.

    Raises:
        ConfigError: something is to break, or a pool cannot be as it should be, which is named then.
    """
    if not config.fleet.pools:
        return []
    if config.faults or config.hazards.replica_per_hour or config.hazards.node_per_hour:
        raise ConfigError("[[faults]] and [hazards] break fleets whose replicas are alike; leave them out, or [[fleet.pools]]")
    kinds = []
    for number, part in enumerate(alike(config), start=1):
        try:
            kinds.append(Kind(part, *prepare(part, model, resolve_gpu(part.cluster.gpu))))
        except ConfigError as error:
            raise ConfigError(f"[[fleet.pools]] number {number}: {error}") from None
    return kinds


def each(kinds: Sequence[Kind]) -> list[Kind]:
    """The kind of replica 0, 1, ..."""
    return [kind for kind in kinds for _ in range(kind.config.fleet.num_initial)]
