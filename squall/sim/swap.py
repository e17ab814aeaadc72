"""What it costs that KV blocks go to the host's memory and back: each takes its time before the first step of a run.

Knows a price for a block, of either way; knows neither who is copied nor when.
"""

from __future__ import annotations

from squall.config import Config
from squall.core.actions import RunSteps
from squall.core.swap import host_blocks_of
from squall.core.types import SECOND, Nanos
from squall.deployment import node_of, plain_plan
from squall.errors import ConfigError
from squall.perf.hardware import Gpu
from squall.perf.latency import UNITS_PER_NANO, BatchShape, LatencyModel, Progression, only_stage
from squall.perf.spec import ModelSpec


class Copying:
    """Satisfies `LatencyModel`: the prices of another one, and `block` nanoseconds for every KV block that is copied."""

    def __init__(self, latency: LatencyModel, block: Nanos) -> None:
        self._latency = latency
        self._block = block

    @property
    def source(self) -> str:
        return self._latency.source

    @property
    def num_stages(self) -> int:
        return self._latency.num_stages

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """As the other one's. Copies come before the first step, and a run that has them has no other."""
        prices = self._latency.run(shape, steps)
        if type(shape) is not RunSteps or not shape.num_copied:
            return prices
        if steps != 1:
            raise ValueError(f"run {shape.run} copies blocks and has {steps} steps")
        return [Progression(1, prices[0].first + shape.num_copied * self._block * UNITS_PER_NANO, 0)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return only_stage(self.run(shape, 1)) if self.num_stages == 1 else self._latency.stages(shape)


def with_copies(config: Config, model: ModelSpec, gpu: Gpu, latency: LatencyModel) -> LatencyModel:
    """`latency`, and the copies of who is preempted where the policy has them: a GPU's part of a block over its host link, of
    which GPUs that share one get their parts. Both ways cost the same, and nothing else runs meanwhile.

    Raises:
        ConfigError: the replicas have several pipeline stages, or take over prompts from others while they load.
    """
    replica = config.replica
    if not host_blocks_of(config.batching):
        return latency
    if replica.pp > 1:
        raise ConfigError(f'batching.preemption = "swap" is for replicas of one pipeline stage; replica.pp is {replica.pp}')
    if config.load.live and plain_plan(config).is_elastic:
        raise ConfigError('batching.preemption = "swap" does not go with load.live; set load.live = false, or recompute')
    dtype = replica.dtype if replica.kv_dtype == "auto" else replica.kv_dtype
    block = replica.block_size * model.kv_bytes_per_token(model.dtypes(dtype)[0], replica.tp, pp=replica.pp)
    node = node_of(config, gpu)
    shared = min(replica.tp, node.gpus_per_host_link)
    return Copying(latency, max(1, round(block * shared * SECOND / node.host_bandwidth)))
