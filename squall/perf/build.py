"""From the configuration's words to a latency model and a KV pool. Knows no configuration file: it reads these few attributes.

`latency` and `replica` are the tables of the same name; anything with their attributes will do.
"""

from pathlib import Path
from typing import Protocol

from squall.errors import ConfigError, ProfileError
from squall.perf.hardware import Gpu
from squall.perf.latency import LatencyModel
from squall.perf.memory import account
from squall.perf.model import ModelSpec
from squall.perf.profile import ProfileModel, load
from squall.perf.roofline import Roofline


class LatencyTable(Protocol):
    """The `[latency]` table."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def overhead_s(self) -> float | None: ...


class ReplicaTable(Protocol):
    """The `[replica]` table."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def num_blocks(self) -> int | None: ...


def latency_model(
    latency: LatencyTable, model: ModelSpec, gpu: Gpu, replica: ReplicaTable, base_dir: Path = Path()
) -> LatencyModel:
    """The source of step times that the configuration asks for; "auto" is the profile where a path is given.

    A relative `latency.path` starts at `base_dir`. Raises ConfigError (ProfileError for the profile itself).
    """
    _refuse_stages(replica)
    if latency.kind not in ("auto", "roofline", "profile"):
        raise ConfigError(f'latency.kind is {latency.kind!r}; it must be "auto", "roofline" or "profile"')
    if latency.kind == "roofline" or (latency.kind == "auto" and latency.path is None):
        return Roofline(model, gpu, replica.tp, replica.dtype, replica.kv_dtype, overhead_s=latency.overhead_s)
    if latency.path is None:
        raise ConfigError('latency.kind is "profile" but latency.path is missing; name the file that `squall profile` wrote')
    path = base_dir / latency.path
    profile = load(path)
    if profile.num_params != model.num_params:
        measured = f"{profile.model} ({profile.num_params:,} parameters)"
        raise ProfileError(f"{path}: was measured with {measured}, not {model.name} ({model.num_params:,}); measure this model")
    return ProfileModel(profile, latency.overhead_s or 0.0)


def num_blocks(model: ModelSpec, gpu: Gpu, replica: ReplicaTable, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """KV blocks of one replica: `replica.num_blocks` where it is given, otherwise what fits. Raises ConfigError."""
    _refuse_stages(replica)
    if replica.num_blocks is not None:
        if replica.num_blocks < 1:
            raise ConfigError(f"replica.num_blocks is {replica.num_blocks}; it must be at least 1, or absent")
        return replica.num_blocks
    return account(
        model,
        gpu,
        tp=replica.tp,
        dtype=replica.dtype,
        kv_dtype=replica.kv_dtype,
        block_size=replica.block_size,
        gpu_memory_utilization=replica.gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    ).num_blocks


def _refuse_stages(replica: ReplicaTable) -> None:
    if replica.pp != 1:
        raise ConfigError(
            f"replica.pp is {replica.pp}; pipeline stages are not supported yet: use 1, and replica.tp to share a model"
        )
