"""What a run ran on, as far as its utilisation goes: floating-point operations, bytes and watts of its GPUs.

Knows sizes and datasheets. Does not know what ran: `detail` multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.config import Config
from squall.core.types import SECOND, ReplicaId
from squall.perf.catalogue import resolve_model
from squall.perf.dtypes import dtype_name
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.roofline import default_dtype
from squall.perf.spec import ModelSpec
from squall.pools import alike
from squall.report.sample import Int64s
from squall.report.steps import Columns

IDLE_SHARE = 0.15
"""Of its board power, what a GPU draws that is held and does nothing (an A100 of 400 W was measured at 62 W)."""

BUSY_SHARES = 0.43, 0.86
"""The same in a step of one token, and in one of `BUSY_TOKENS` and more: an H100 of 700 W draws 300 W at batch 1 and 600 W at
batch 128 (ML.ENERGY benchmark v3). Between them the share grows with the logarithm of the tokens."""

BUSY_TOKENS = 128

Floats = NDArray[np.float64]


class Deployed(Struct, frozen=True):
    """One replica's GPUs and the model on them.

    Attributes:
        dtype, weight_dtype, kv_dtype: as they run, of activations, matrices and cache.
    """

    model: ModelSpec
    gpu: Gpu
    tp: int
    pp: int
    block_size: int
    dtype: str
    weight_dtype: str
    kv_dtype: str

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def peak_flops(self) -> float:
        """Operations a second of one GPU in the arithmetic that the matrices run in, by its datasheet."""
        if self.weight_dtype == "fp8" and self.gpu.fp8_flops is not None:
            return self.gpu.fp8_flops
        return self.gpu.flops

    def flops(self, columns: Columns) -> Floats:
        """Multiplications and additions of each stretch, all GPUs together.

        Matrices once a token, the head once a token that is produced, attention once a pair of tokens that attend. Where a layer
        looks back a window only, the stretch's mean context stands for each of its contexts.
        """
        model = self.model
        count = columns["count"].astype(np.float64)
        head = 2 * model.vocab_size * model.hidden_size
        tokens = (columns["num_decodes"] + columns["num_prefill_tokens"]) * count
        total = (model.flops_per_token() - head) * tokens + head * columns["num_logits"] * count
        decode_pairs, prefill_pairs = pairs(columns)
        decoded = np.maximum(columns["num_decodes"] * count, 1)
        computed = np.maximum(columns["num_prefill_tokens"] * count, 1)
        for group in model.layers:
            if (part := group.cached) is None:
                continue
            window = np.inf if part.window is None else part.window
            seen = decode_pairs * np.minimum(1, window / np.maximum(decode_pairs / decoded, 1))
            total += group.count * part.decode_pair_flops * seen
            seen = prefill_pairs * np.minimum(1, window / np.maximum(prefill_pairs / computed, 1))
            total += group.count * part.pair_flops * seen
        return total

    @property
    def weight_bytes(self) -> int:
        """On the fullest GPU."""
        return self.model.weight_bytes(self.tp, self.weight_dtype, pp=self.pp)

    @property
    def block_bytes(self) -> int:
        """Of one KV block, on each GPU."""
        return self.block_size * self.model.kv_bytes_per_token(self.kv_dtype, self.tp, pp=self.pp)

    def busy_joules(self, columns: Columns, durations: Int64s) -> Floats:
        """Energy of each stretch: the GPUs of its stage, each at the share of its power that the step's tokens ask for."""
        low, high = BUSY_SHARES
        tokens = np.maximum(columns["num_decodes"] + columns["num_prefill_tokens"], 1)
        share = low + (high - low) * np.minimum(1.0, np.log(tokens) / np.log(BUSY_TOKENS))
        joules: Floats = share * self.gpu.power_w * self.tp * durations / SECOND
        return joules

    @property
    def idle_watts(self) -> float:
        """Of one GPU that is held and does nothing."""
        return IDLE_SHARE * self.gpu.power_w


On = Deployed | Mapping[ReplicaId, Deployed]
"""What all replicas run on, or each one."""


def pairs(columns: Columns) -> tuple[Floats, Floats]:
    """Of each stretch: pairs of a token and one that it attends to, itself included, of decodes and of prefill chunks."""
    count = columns["count"].astype(np.float64)
    steps = count * columns["offset"] + count * (count - 1) / 2  # the sum of their numbers within the run
    decodes = count * columns["decode_context"] + steps * columns["num_decodes"]
    prefills = count * columns["prefill_pairs"] + steps * columns["num_prefill_tokens"] ** 2
    return decodes, prefills


def deployed(config: Config) -> On:
    """What the configuration runs on. "cpu" is measured, in a fifth of a second.

    Raises ConfigError where it names what is not known.
    """
    parts = alike(config)
    if len(parts) == 1:
        return _deployed(parts[0])
    each = [on for part in parts for on in [_deployed(part)] * part.fleet.num_initial]
    return dict(enumerate(each))


def _deployed(config: Config) -> Deployed:
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    replica = config.replica
    asked = default_dtype(model, gpu) if replica.dtype == "auto" else replica.dtype
    dtype, weight_dtype = model.dtypes(asked)
    kv_dtype = dtype if replica.kv_dtype == "auto" else dtype_name(replica.kv_dtype)
    return Deployed(model, gpu, replica.tp, replica.pp, replica.block_size, dtype, weight_dtype, kv_dtype)
