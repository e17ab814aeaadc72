"""From the configuration's words to a latency model and a KV pool. Knows no configuration file: it reads these few attributes.

`latency` and `replica` are the tables of the same name; anything with their attributes will do.
"""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from squall.errors import ConfigError, ProfileError
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.dtypes import dtype_name
from squall.perf.efficiency import Efficiency
from squall.perf.hardware import GPUS, Gpu
from squall.perf.latency import LatencyModel
from squall.perf.memory import account, check_dtype
from squall.perf.model import ModelSpec
from squall.perf.operators import OperatorSource
from squall.perf.profile import ProfileModel, load
from squall.perf.roofline import Links, RooflineSource, layout_of
from squall.perf.speculation import Speculation
from squall.perf.topology import gpu_of, nic_bandwidth_per_gpu, resolve_node

if TYPE_CHECKING:
    from squall.perf.tables.source import TableSource

KINDS = ("auto", "roofline", "profile", "measured", "forest")


class SpeculationTable(Protocol):
    """The `[latency.speculation]` table."""

    @property
    def draft_tokens(self) -> int: ...
    @property
    def acceptance(self) -> float: ...
    @property
    def model(self) -> str | None: ...


class LatencyTable(Protocol):
    """The `[latency]` table."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def engine(self) -> str: ...
    @property
    def overhead_s(self) -> float | None: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def overlap_send(self) -> bool: ...
    @property
    def speculation(self) -> SpeculationTable | None: ...


class ClusterTable(Protocol):
    """The `[cluster]` table."""

    @property
    def gpus_per_node(self) -> int: ...
    @property
    def node(self) -> str | None: ...
    @property
    def nic_gbps(self) -> float | None: ...


class ReplicaTable(Protocol):
    """The `[replica]` table."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def ep(self) -> int: ...
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
    latency: LatencyTable,
    model: ModelSpec,
    gpu: Gpu,
    replica: ReplicaTable,
    base_dir: Path = Path(),
    links: Links | None = None,
) -> LatencyModel:
    """The source of step times that the configuration asks for.

    "auto" is the profile where a path is given, of whole steps or of operators; otherwise the installed tables of measured
    operators where they know the GPU, and the datasheet for what they do not know. A relative `latency.path` starts at
    `base_dir`; `links` is what joins GPUs beyond their own link. Raises ConfigError (ProfileError for the profile itself).
    """
    if latency.kind not in KINDS:
        raise ConfigError(f"latency.kind is {latency.kind!r}; it must be {_either(KINDS)}")
    check_arithmetic(model, gpu, replica)
    if latency.kind == "profile" and latency.path is None:
        raise ConfigError('latency.kind is "profile" but latency.path is missing; name the file that `squall profile` wrote')
    path = None if latency.path is None else base_dir / latency.path
    if path is not None and latency.kind in ("auto", "profile") and not _holds_operators(path):
        return _steps(latency, model, replica, path)
    return _operators(latency, model, gpu, replica, path, links)


def operators_model(
    latency: LatencyTable, model: ModelSpec, gpu: Gpu, replica: ReplicaTable, links: Links | None = None
) -> Composed:
    """The same where it is made of operators, which can be told apart. Raises ConfigError for a profile of whole steps."""
    priced = latency_model(latency, model, gpu, replica, links=links)
    if not isinstance(priced, Composed):
        raise ConfigError(f"{latency.path} holds whole steps, which cannot be told apart; leave latency.path out")
    return priced


def _steps(latency: LatencyTable, model: ModelSpec, replica: ReplicaTable, path: Path) -> ProfileModel:
    """Whole steps, as they were measured: they cannot be cut or changed."""
    profile = load(path)
    if profile.num_params != model.num_params:
        measured = f"{profile.model} ({profile.num_params:,} parameters)"
        raise ProfileError(f"{path}: was measured with {measured}, not {model.name} ({model.num_params:,}); measure this model")
    for key in ("tp", "block_size"):
        held, asked = getattr(profile, key), getattr(replica, key)
        if held is not None and held != asked:
            raise ProfileError(
                f"{path}: was measured with replica.{key} = {held}, not {asked}; use {held}, or measure with {asked}"
            )
    if replica.pp != 1:
        raise ConfigError(f"replica.pp is {replica.pp}, but {path} holds whole steps, not stages; use a profile of operators")
    for key in ("sequence_parallel", "overlap_send", "launch_s", "speculation"):
        if getattr(latency, key):
            raise ConfigError(f"latency.{key} changes operators, but {path} holds whole steps; use a profile of operators")
    return ProfileModel(profile, latency.overhead_s or 0.0)


def _operators(
    latency: LatencyTable, model: ModelSpec, gpu: Gpu, replica: ReplicaTable, path: Path | None, links: Links | None
) -> Composed:
    layout = Layout(
        replica.tp, replica.pp, replica.ep,
        sequence_parallel=latency.sequence_parallel, overlap_send=latency.overlap_send,
    )  # fmt: skip
    layout = layout_of(model, gpu, layout, replica.dtype, replica.kv_dtype)
    roofline = RooflineSource(gpu, links, dtype=layout.dtype)
    measured = _measured(latency, model, gpu, layout, replica.block_size, path)
    sources: list[OperatorSource] = [*([measured] if measured else []), roofline]
    speculation, draft = _speculation(latency, gpu, layout, sources, roofline)
    overhead_s = measured.step_s if measured and latency.overhead_s is None else latency.overhead_s
    return _composed(
        model, gpu.name, layout, tuple(sources), roofline.efficiency, overhead_s, latency.launch_s, speculation, draft
    )


@lru_cache(maxsize=16)
def _composed(
    model: ModelSpec,
    place: str,
    layout: Layout,
    sources: tuple[OperatorSource, ...],
    efficiency: Efficiency,
    overhead_s: float | None,
    launch_s: float,
    speculation: Speculation | None,
    draft: Composed | None,
) -> Composed:
    """One for all that are made of the same: what it has worked out need not be worked out again."""
    return Composed(model, place, layout, sources, efficiency, overhead_s, launch_s, speculation, draft)


def _measured(
    latency: LatencyTable, model: ModelSpec, gpu: Gpu, layout: Layout, block_size: int, path: Path | None
) -> "TableSource | None":
    """What is asked before the datasheet."""
    if latency.kind == "roofline":
        return None
    if latency.kind == "auto" and path is None and not _tables_know(gpu):
        return None
    from squall.perf.tables.choose import measured_source  # only now: it brings readers of several formats

    forest = latency.kind == "forest"
    return measured_source(path, gpu, model, layout, block_size, engine=latency.engine, forest=forest)


def _tables_know(gpu: Gpu) -> bool:
    """Whether the tables of the extra `measured` are installed and hold this GPU."""
    if find_spec("aiconfigurator_core") is None:
        return False
    from squall.perf.tables.aiconfigurator import SYSTEMS
    from squall.perf.tables.installed import installed_root

    root = installed_root()
    return root is not None and gpu.name in SYSTEMS and (root / SYSTEMS[gpu.name]).is_dir()


def _holds_operators(path: Path) -> bool:
    if path.is_dir():
        return True
    if not path.is_file():
        return False
    from squall.perf.tables.profile import is_operator_profile

    return is_operator_profile(path)


def _speculation(
    latency: LatencyTable, gpu: Gpu, layout: Layout, sources: list[OperatorSource], roofline: RooflineSource
) -> tuple[Speculation | None, Composed | None]:
    """The draft model shares the GPUs as the model does, where it can; otherwise each keeps a copy."""
    table = latency.speculation
    if table is None:
        return None, None
    speculation = Speculation(table.draft_tokens, table.acceptance)
    if table.model is None:
        return speculation, None
    from squall.perf.catalogue import resolve_model

    draft = resolve_model(table.model)
    tp = layout.tp if draft.can_share(layout.tp) else 1
    shared = layout_of(draft, gpu, replace(layout, tp=tp, ep=1, sequence_parallel=False), "auto", layout.kv_dtype)
    return speculation, _composed(draft, gpu.name, shared, tuple(sources), roofline.efficiency, 0.0, 0.0, None, None)


def joined(gpu: Gpu, cluster: ClusterTable, tp: int) -> tuple[Gpu, Links]:
    """The GPU with the link that joins `tp` of them in the cluster's machines, and the network between these.

    Raises ConfigError for an unknown machine, or one with other GPUs.
    """
    links = Links(cluster.gpus_per_node)
    if cluster.node is not None:
        node = resolve_node(cluster.node)
        if node.gpu != gpu.name:
            raise ConfigError(f"cluster.node {cluster.node!r} has {node.gpu} GPUs, not {gpu.name}; correct it, or cluster.gpu")
        there = gpu_of(node, tp)
        gpu = replace(gpu, link=there.link, link_bandwidth=there.link_bandwidth)
        links = replace(links, network_bandwidth=nic_bandwidth_per_gpu(node))
    if cluster.nic_gbps is not None:
        links = replace(links, network_bandwidth=cluster.nic_gbps * 1e9 / 8)
    return gpu, links


def num_blocks(model: ModelSpec, gpu: Gpu, replica: ReplicaTable, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """KV blocks of one replica: `replica.num_blocks` where it is given, otherwise what fits. Raises ConfigError."""
    if replica.num_blocks is not None:
        if replica.num_blocks < 1:
            raise ConfigError(f"replica.num_blocks is {replica.num_blocks}; it must be at least 1, or absent")
        return replica.num_blocks
    return account(
        model,
        gpu,
        tp=replica.tp,
        pp=replica.pp,
        ep=replica.ep,
        dtype=replica.dtype,
        kv_dtype=replica.kv_dtype,
        block_size=replica.block_size,
        gpu_memory_utilization=replica.gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    ).num_blocks


def check_arithmetic(model: ModelSpec, gpu: Gpu, replica: ReplicaTable) -> None:
    """Raises ConfigError for number types that the GPU does not have, and for shares that cannot be, saying what would work.

    Weights of fewer bits than the GPU computes in are no obstacle: they are widened on the way, as engines do.
    """
    check_dtype(model, gpu, replica.dtype)
    model.check_tp(replica.tp, replica.ep)
    model.stages(replica.pp)
    if replica.ep > replica.tp:
        raise ConfigError(
            f"replica.ep is {replica.ep}, more than replica.tp = {replica.tp}: requests would be shared among groups of GPUs, "
            f"which fleets do not know yet; use at most {replica.tp}"
        )
    if replica.kv_dtype != "auto" and dtype_name(replica.kv_dtype) == "fp8" and gpu.kind != "cpu" and gpu.fp8_flops is None:
        able = ", ".join(name for name, other in GPUS.items() if other.fp8_flops)
        raise ConfigError(f'replica.kv_dtype is fp8, which {gpu.name} does not compute; use "auto", or one of {able}')


def _either(words: tuple[str, ...]) -> str:
    quoted = [f'"{word}"' for word in words]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
