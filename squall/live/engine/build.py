"""From the configuration to engines: the one place that knows which there are. Imports torch only for an engine that needs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain

from msgspec.structs import replace

from squall.config import Config
from squall.core.fleet_plan import FleetPlan
from squall.deployment import full_plan
from squall.errors import ConfigError, ModelError
from squall.live.engine.interface import Engine
from squall.live.engine.team import Team
from squall.live.served import ServedModel
from squall.perf.build import latency_model, num_blocks
from squall.perf.hardware import Gpu, resolve_gpu


def engine_maker(config: Config, model: ServedModel) -> Callable[[], Engine]:
    """Makes one engine a call; what the engines of a process can share is made once, here.

    Raises:
        ConfigError: the model does not fit, or the configuration asks for what there is not.
        ModelError: the tokenizer or a profile cannot be read.
    """
    if config.replica.pp != 1:
        raise ConfigError(f"replica.pp is {config.replica.pp}; pipeline stages are simulated, not served: use 1, and replica.tp")
    gpu = accelerator(config)
    return (_emulated if config.serve.engine == "emulated" else _torch)(config, model, gpu)


def _emulated(config: Config, model: ServedModel, gpu: Gpu) -> Callable[[], Engine]:
    from squall.live.engine.emulated import EmulatedEngine

    latency = latency_model(config.latency, model.spec, gpu, config.replica)
    blocks, tokenizer = _num_blocks(config, model, gpu), model.tokenizer()
    size, longest, dilation = config.replica.block_size, model.max_model_len, config.serve.time_dilation
    return lambda: EmulatedEngine(latency, blocks, size, longest, tokenizer, dilation, model.spec.num_layers)


def emulated_plan(config: Config, model: ServedModel) -> FleetPlan:
    """The cluster that is pretended, with what one replica can do in the time of the wall. Raises as `engine_maker`."""
    gpu, dilation = accelerator(config), config.serve.time_dilation
    latency = latency_model(config.latency, model.spec, gpu, config.replica)
    plan = full_plan(config, model.spec, gpu, latency, _num_blocks(config, model, gpu))
    found = plan.capacity
    assert found is not None
    capacity = replace(
        found,
        prefill_tokens_per_s=found.prefill_tokens_per_s / dilation,
        decode_tokens_per_s=found.decode_tokens_per_s / dilation,
        load_s=found.load_s * dilation,
    )
    return replace(plan, capacity=capacity)


def refuse_uneven(config: Config, model: ServedModel) -> None:
    """Raises ConfigError where the built-in engine cannot deal a replica out over replica.tp ranks, before any is started.

    It does what engines on GPUs do: whole heads and columns of the MLP; KV heads may be copied.
    """
    model.spec.check_tp(config.replica.tp)


def _torch(config: Config, model: ServedModel, gpu: Gpu) -> Callable[[], Engine]:
    refuse_uneven(config, model)
    folder = model.folder
    if folder is None:
        raise ModelError(f"model {config.model.name!r} has no checkpoint here; the built-in engine needs one")
    teams = _teams(config.replica.tp)
    first = next(teams)  # its processes import torch while we do
    from squall.live.engine.torch_engine import TorchEngine

    blocks, tokenizer = _num_blocks(config, model, gpu), model.tokenizer()
    waiting = chain([first], teams)
    return lambda: TorchEngine(
        folder,
        tokenizer,
        num_blocks=blocks,
        block_size=config.replica.block_size,
        max_model_len=model.max_model_len,
        device=config.serve.device,
        dtype=config.replica.dtype,
        threads=config.serve.compute_threads,
        team=next(waiting),
    )


def _teams(tp: int) -> Iterator[Team | None]:
    """The other ranks of one replica after the other, started; None where there are none."""
    while True:
        team = Team(tp) if tp > 1 else None
        if team is not None:
            team.start()
        yield team


def _num_blocks(config: Config, model: ServedModel, gpu: Gpu) -> int:
    """A user's own batching policy need not bound the batch; the account is then made for the usual bounds."""
    batching = config.batching
    tokens, seqs = getattr(batching, "max_num_batched_tokens", 2048), getattr(batching, "max_num_seqs", 256)
    return num_blocks(model.spec, gpu, config.replica, max_num_batched_tokens=tokens, max_num_seqs=seqs)


def accelerator(config: Config) -> Gpu:
    """What a replica runs on, or is said to. Where only its memory matters, no peaks are measured or looked up."""
    device = config.serve.device
    if config.serve.engine == "emulated" or config.cluster.gpu.lower() != "cpu":
        return resolve_gpu(config.cluster.gpu)
    if not device.startswith("cuda"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _plain(device, "cpu", memory // config.replica.tp)  # which a replica's ranks share
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"serve.device is {device!r}, but this PyTorch sees no GPU; use 'cpu', or install a CUDA build")
    return _plain(device, "gpu", torch.cuda.mem_get_info(device)[1])


def _plain(name: str, kind: str, memory_bytes: int) -> Gpu:
    """A device of which only the memory is known."""
    return Gpu(
        name, kind, flops=0.0, fp8_flops=None, memory_bytes=memory_bytes, bandwidth=0.0, link="", link_bandwidth=0.0,
        pcie_bandwidth=0.0, usd_per_hour=0.0, price="", source="the system",
    )  # fmt: skip
