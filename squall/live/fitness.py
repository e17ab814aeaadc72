"""What cannot be served, found before any worker is started: what is simulated only, and what this machine lacks.

Imports no torch. Only what is sure: workers look for themselves, and know more.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from squall.config import Config
from squall.core.swap import host_blocks_of
from squall.cores import num_cores
from squall.errors import ConfigError
from squall.extras import INSTALL, install
from squall.live.served import ServedModel
from squall.quantities import counted

AMD_DRIVER = Path("/dev/kfd")


def refuse_simulated(config: Config) -> None:
    """Raises ConfigError for what no engine here does."""
    if getattr(config.batching, "prefix_cache_outputs", False):
        raise ConfigError("batching.prefix_cache_outputs is for simulations; the engines here keep the blocks of prompts alone")
    if host_blocks_of(config.batching):
        raise ConfigError('batching.preemption = "swap" is for simulations; the engines here compute again who was preempted')
    replica = config.replica
    if replica.pp != 1:
        raise ConfigError(f"replica.pp is {replica.pp}; pipeline stages are simulated, not served: use 1, and replica.tp")
    if config.serve.engine == "torch" and replica.kv_dtype != "auto":
        raise ConfigError(
            f"replica.kv_dtype is {replica.kv_dtype!r}; the built-in engine keeps KV in the type that it computes in; "
            "leave it out, and set replica.dtype"
        )


def refuse_untraceable(config: Config) -> None:
    """Raises ConfigError where spans are wanted and cannot be sent; whether somebody takes them is not known yet."""
    endpoint = config.serve.otlp_endpoint
    if endpoint is None:
        return
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"serve.otlp_endpoint is {endpoint!r}; expected a collector's URL, such as 'http://localhost:4318'")
    try:
        exporter = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:  # nor is what it lies in
        exporter = None
    if exporter is None:
        raise ConfigError(f"serve.otlp_endpoint needs OpenTelemetry, which is not installed: {install('otel')}")


def refuse_unfit(config: Config, model: ServedModel) -> None:
    """Raises ConfigError, naming the key and what would do. Workers of the built-in engine, on this machine."""
    device = config.serve.device
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"the built-in engine needs torch, which is not installed: {INSTALL}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"serve.device is {device!r}; use 'cpu' or 'cuda'")
    if device != "cpu":
        _refuse_without_gpu(device)
    elif config.replica.num_blocks is not None:
        _refuse_more_than_memory(config, model, config.replica.num_blocks)
    if config.serve.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            f"serve.transport is 'nixl', which is not installed here: {install('nixl')}; 'auto' and 'tcp' need nothing"
        )


def crowded(config: Config) -> str | None:
    """What to say of a fleet that may have more ranks, each a thread of compute, than there are cores; None where it may not."""
    most = config.fleet.num_maximum * config.replica.tp
    cores = num_cores()
    if config.serve.engine != "torch" or config.serve.device != "cpu" or config.launcher.kind != "local" or most <= cores:
        return None
    return f"the fleet may have {most} ranks, and {cores} cores are here: each will be slower than it is alone"


def _refuse_without_gpu(device: str) -> None:
    built = importlib.metadata.version("torch")
    if built.endswith("+cpu"):
        raise ConfigError(f"serve.device is {device!r}, but torch {built} is built for CPUs; use 'cpu', or install a CUDA build")
    if not has_driver():
        raise ConfigError(f"serve.device is {device!r}, but no GPU driver is loaded here; use 'cpu', or see what nvidia-smi says")


def has_driver() -> bool:
    """Whether there is a GPU's driver (NVIDIA's or AMD's); not whether there is a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return AMD_DRIVER.exists()
    return True


def _refuse_more_than_memory(config: Config, model: ServedModel, num_blocks: int) -> None:
    """KV pools that the user wants so large, of all replicas that the fleet begins with."""
    replica, num = config.replica, max(1, config.fleet.num_initial)
    dtype = "fp32" if replica.dtype == "auto" else replica.dtype
    block = replica.block_size * model.spec.kv_bytes_per_token(dtype, replica.tp) * replica.tp * num
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_blocks * block > memory:
        of = counted(num, "replica")
        raise ConfigError(
            f"replica.num_blocks = {num_blocks} is {num_blocks * block / 1e9:,.1f} GB of KV cache for {of}, and this machine has "
            f"{memory / 1e9:,.1f} GB of memory in all; use at most {memory // block}, or leave it out"
        )
