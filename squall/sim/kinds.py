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
from squall.sim.swap import with_copies


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
    if config.faults or config.hazards.may_strike:
        raise ConfigError("[[faults]] and [hazards] break fleets whose replicas are alike; leave them out, or [[fleet.pools]]")
    parts = alike(config)
    if len({files_outputs_of(part) for part in parts if part.batching.prefix_cache}) > 1:
        raise ConfigError(
            "prefix_cache_outputs differs between [[fleet.pools]]; say it in [batching], for all that have a prefix_cache"
        )
    kinds = []
    for number, part in enumerate(parts, start=1):
        try:
            gpu = resolve_gpu(part.cluster.gpu)
            latency, num_blocks = prepare(part, model, gpu)
            kinds.append(Kind(part, with_copies(part, model, gpu, latency), num_blocks))
        except ConfigError as error:
            raise ConfigError(f"[[fleet.pools]] number {number}: {error}") from None
    return kinds


def files_outputs_of(config: Config) -> bool:
    """Whether replicas keep the blocks of answers under their hashes."""
    batching = config.batching
    return batching.prefix_cache and bool(getattr(batching, "prefix_cache_outputs", False))


def each(kinds: Sequence[Kind]) -> list[Kind]:
    """The kind of replica 0, 1, ..."""
    return [kind for kind in kinds for _ in range(kind.config.fleet.num_initial)]
