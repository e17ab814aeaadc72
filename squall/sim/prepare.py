"""From a configuration to what its simulation needs beside requests: prices of steps, and a KV pool.

Knows which part makes what. `twin.rehearse` plays one workload with it, `search` many.
"""

from __future__ import annotations

from squall.config import Config
from squall.perf.build import joined, latency_model, num_blocks
from squall.perf.hardware import Gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec


def prepare(config: Config, model: ModelSpec, gpu: Gpu, known: LatencyModel | None = None) -> tuple[LatencyModel, int]:
    """The latency model of every replica of `config`, and the KV blocks of each.

    `known` is taken for the former where it is given: that of a configuration that differs in none of `[model]`, `[cluster]`,
    `[replica]` and `[latency]`. Models remember prices, so that many configurations had better share one.

    Raises:
        ConfigError: the model cannot be shared like that or does not fit, or a profile cannot be used.
    """
    gpu, links = joined(gpu, config.cluster, config.replica.tp)
    latency = known or latency_model(config.latency, model, gpu, config.replica, links=links)
    # a policy of the user's own need not bound the batch; the memory account then takes the usual bounds
    batch = config.batching
    tokens, seqs = getattr(batch, "max_num_batched_tokens", 2048), getattr(batch, "max_num_seqs", 256)
    return latency, num_blocks(model, gpu, config.replica, max_num_batched_tokens=tokens, max_num_seqs=seqs)
