"""The one configuration tree of all commands: which keys there are, and what makes a tree of tables a configuration.

Does not know what a value does: every table is read by the module that it configures, and a policy's table is the policy
itself. Whatever is wrong with a file or a key becomes one `ConfigError` that names the place and the fix.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
import tomli_w
from msgspec import Meta, Struct, field

from squall.errors import ConfigError
from squall.fleet_tables import (
    Capacities,
    Fault,
    Fleet,
    Handoff,
    Hazards,
    Startup,
    faults_mistake,
    fleet_mistake,
    policies_mistake,
)
from squall.launch_tables import Launcher, launcher_mistake
from squall.mistakes import explain, extreme, kind_of, shown, strange
from squall.policies.batching import Batching, Vllm
from squall.policies.load import Disk, Load
from squall.policies.route import LeastLoaded, LeastPromised, Route
from squall.policies.scale import Fixed, Scale
from squall.quantities import Blocks, Count, Fraction, Gpus, NotNegative, Rate, Seconds
from squall.trees import merge, read_tree
from squall.workload.spec import Workload


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: a catalogue name, or the path of a config.json or of a checkpoint directory."""

    name: str = "smollm2-135m-instruct"
    served_as: tuple[str, ...] = ()  # names that clients may use; the model's own name when empty


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """What there is to run on. `gpu` is a catalogue name; "cpu" is this machine."""

    gpu: str = "cpu"
    nodes: Annotated[int, Meta(ge=1, le=100_000)] = 1
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)] = 8
    usd_per_gpu_hour: Annotated[float, Meta(ge=0)] | None = None  # overrides the catalogue's price
    node: str | None = None  # a machine of the catalogue, for its links; the largest with this GPU when None
    nodes_per_leaf: NotNegative = 0  # on one leaf switch; 0 is all
    nic_gbps: Rate | None = None  # of each GPU to other nodes, a direction; this and the next two override the catalogue
    host_gbps: Rate | None = None  # of each GPU from its host's memory
    ssd_gbps: Rate | None = None  # of each node's disks
    store_gbps: Rate = 24.0  # of each node from where checkpoints lie: an object store over 25GbE, read in parallel
    oversubscription: Annotated[float, Meta(ge=1, le=1000)] = 1.0  # of leaf switches: what NICs send / what uplinks carry


class ReplicaSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one replica. `num_blocks` overrides what the memory model says."""

    tp: Gpus = 1
    pp: Gpus = 1
    ep: Gpus = 1  # of the tp GPUs, those that experts are dealt out over
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gpu_memory_utilization: Fraction = 0.9
    num_blocks: Blocks | None = None
    max_model_len: Count | None = None  # prompt and output together; None: the model's own where it is served, else no bound


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """The router's waiting room, bounded in requests and in prompt tokens."""

    max_requests: Count = 4096
    max_tokens: Count = 16_000_000
    max_retries: NotNegative = 2  # how often a request may lose its replica


class Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding, accounted for in prices: `draft_tokens` a step, each accepted with probability `acceptance`."""

    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 4
    acceptance: Annotated[float, Meta(ge=0, le=1)] = 0.7
    model: str | None = None  # that drafts; None drafts for free, from the prompt


class Latency(Struct, frozen=True, forbid_unknown_fields=True):
    """Where step times come from; docs/latency.md says which source is asked for what. `path` is a profile."""

    kind: Literal["auto", "roofline", "profile", "measured", "forest"] = "auto"
    path: str | None = None
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"  # whose kernels, where the installed tables are asked
    overhead_s: Annotated[float, Meta(ge=0, le=60)] | None = None  # a step, over the GPU's own time; None: the source's
    launch_s: Annotated[float, Meta(ge=0, le=60)] = 0.0  # of the CPU for a kernel, in engines that capture no graphs
    sequence_parallel: bool = False  # norms are shared too: reduce-scatter and all-gather instead of all-reduce
    overlap_send: bool = False  # a pipeline stage hands on while it computes the next batch
    speculation: Speculation | None = None


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request is promised: time to first token, mean time between tokens, end to end; kept by a share of `attainment`.

    `ttft_p90_s` and its like promise a quantile over all requests instead (`tbt`: over all gaps of all requests).
    """

    ttft_s: Seconds | None = None
    tbt_s: Seconds | None = None
    e2e_s: Seconds | None = None
    attainment: Fraction = 0.99
    ttft_p50_s: Seconds | None = None
    ttft_p90_s: Seconds | None = None
    ttft_p95_s: Seconds | None = None
    ttft_p99_s: Seconds | None = None
    tbt_p50_s: Seconds | None = None
    tbt_p90_s: Seconds | None = None
    tbt_p95_s: Seconds | None = None
    tbt_p99_s: Seconds | None = None
    tpot_p50_s: Seconds | None = None
    tpot_p90_s: Seconds | None = None
    tpot_p95_s: Seconds | None = None
    tpot_p99_s: Seconds | None = None
    e2e_p50_s: Seconds | None = None
    e2e_p90_s: Seconds | None = None
    e2e_p95_s: Seconds | None = None
    e2e_p99_s: Seconds | None = None
    queue_p50_s: Seconds | None = None
    queue_p90_s: Seconds | None = None
    queue_p95_s: Seconds | None = None
    queue_p99_s: Seconds | None = None

    @property
    def promises_requests(self) -> bool:
        """Whether there is something that a single request can keep or break."""
        return (self.ttft_s, self.tbt_s, self.e2e_s) != (None, None, None)

    def quantiles(self) -> list[tuple[str, float, float]]:
        """Metric, quantile and seconds of each quantile that is promised: ("ttft", 0.9, 2.0)."""
        found = []
        for name in self.__struct_fields__:
            metric, _, percent = name.removesuffix("_s").partition("_p")
            if percent and (seconds := getattr(self, name)) is not None:
                found.append((metric, int(percent) / 100, seconds))
        return found


class Serve(Struct, frozen=True, forbid_unknown_fields=True):
    """The live body. The emulated engine sleeps for predicted times, stretched by `time_dilation`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    engine: Literal["torch", "emulated"] = "torch"
    device: str = "cpu"
    compute_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # web pages that may call the endpoint from a browser; "*" is all of them
    drain_timeout_s: Seconds = 30.0
    time_dilation: Seconds = 1.0
    reading: Literal["buffered", "direct", "mapped"] = "buffered"  # of checkpoints: through the page cache, past it, as memory
    link_gbps: Rate | None = None  # all that a worker sends, as if its link were no faster; cluster.nic_gbps when None
    transport: Literal["auto", "tcp", "nixl"] = "auto"  # between workers; auto: shared memory on one machine, TCP elsewhere
    vllm_metrics: bool = True
    event_log: bool = True
    otlp_endpoint: str | None = None  # of a collector that gets a span of every request: "http://localhost:4318"


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """One execution: its dice, its run directory (named after the command and the time when None), and what a simulation keeps.

    `detail` looks at the engines too, and all keys below it imply that: a file with every step, one for a timeline viewer, one
    with a row every `series_s` seconds, one with a row for every kind of operator, one with Vidur's definitions.
    """

    seed: NotNegative = 0
    out: str | None = None
    duration_s: Seconds | None = None  # a simulation ends then, at the latest
    detail: bool = False
    steps: bool = False
    trace: bool = False
    trace_from_s: Annotated[float, Meta(ge=0)] = 0.0  # where a trace begins that cannot hold all
    series_s: Seconds | None = None
    operators: bool = False
    compat: Literal["vidur"] | None = None


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree; every table has defaults, only a simulation or a replay needs a `[workload]`."""

    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    replica: ReplicaSpec = field(default_factory=ReplicaSpec)
    fleet: Fleet = field(default_factory=Fleet)
    batching: Batching = field(default_factory=Vllm)
    route: Route = field(default_factory=LeastLoaded)
    decode_route: Route = field(default_factory=LeastPromised)  # of hand-offs, in a disaggregated fleet
    handoff: Handoff = field(default_factory=Handoff)
    queue: Queue = field(default_factory=Queue)
    scale: Scale = field(default_factory=Fixed)
    load: Load = field(default_factory=Disk)
    startup: Startup = field(default_factory=Startup)
    launcher: Launcher = field(default_factory=Launcher)
    capacity: Capacities = field(default_factory=Capacities)
    faults: tuple[Fault, ...] = ()
    hazards: Hazards = field(default_factory=Hazards)
    workload: Workload | None = None
    latency: Latency = field(default_factory=Latency)
    slo: Slo = field(default_factory=Slo)
    serve: Serve = field(default_factory=Serve)
    run: Run = field(default_factory=Run)


SEARCH = "search"
"""The table that `squall search` reads by itself; no other command looks at it."""

POLICY_TABLES = ("batching", "route", "decode_route", "scale", "load")
"""Tables whose `kind` may also be "package.module:Class", a policy of the user's own. Without one they mean the default kind."""

DEFAULTS: Final = Config()


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` (all defaults when None), with `key=value` overrides applied last.

    Paths inside the file are taken relative to it, those in overrides relative to the working directory; both come out
    absolute, so that the resolved configuration can be run again from anywhere.

    Raises:
        ConfigError: the file cannot be read or is not TOML, a key does not exist, or a value does not fit.
    """
    where = str(path) if path is not None else "configuration"
    alone = read_tree(path)
    alone.pop(SEARCH, None)
    if not overrides:
        return from_tree(where, alone)
    tree = read_tree(path, overrides)
    tree.pop(SEARCH, None)
    try:
        return from_tree("--set", tree)
    except ConfigError:
        from_tree(where, alone)  # the file's own mistake comes first
        raise


def from_tree(where: str, tree: dict[str, Any]) -> Config:
    """The configuration that a tree of tables stands for; `where` is the place that errors name.

    Raises:
        ConfigError: a key does not exist, or a value does not fit.
    """
    tree = dict(tree)
    for name in POLICY_TABLES:
        if isinstance(tree.get(name), dict) and "kind" not in tree[name]:
            tree[name] = {"kind": getattr(DEFAULTS, name).__struct_config__.tag, **tree[name]}
    _complete_pools(tree)
    own = {name: tree.pop(name) for name in POLICY_TABLES if ":" in str(kind_of(tree.get(name)))}
    if (mistake := strange(tree)) is not None:
        raise ConfigError(f"{where}: {mistake}")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain(str(error), tree, Config)}") from None
    config = msgspec.structs.replace(config, **{name: _own_policy(where, name, table) for name, table in own.items()})
    mistake = extreme(tree)
    mistake = mistake or fleet_mistake(config.fleet, config.cluster, config.replica)
    mistake = mistake or faults_mistake(config.faults, config.hazards, config.fleet, config.cluster, config.replica)
    mistake = mistake or policies_mistake(config.fleet, config.scale, config.load)
    mistake = mistake or launcher_mistake(config.launcher, config.fleet, config.replica.tp * config.replica.pp)
    if mistake is not None:
        raise ConfigError(f"{where}: {mistake}")
    return config


def _complete_pools(tree: dict[str, Any]) -> None:
    """What a pool's `batching` does not say is as `[batching]` says."""
    fleet = tree.get("fleet")
    pools = fleet.get("pools") if isinstance(fleet, dict) else None
    if not (isinstance(fleet, dict) and isinstance(pools, list)):
        return
    whole = tree.get("batching", {"kind": DEFAULTS.batching.__struct_config__.tag})
    complete: list[Any] = []
    for pool in pools:
        if isinstance(pool, dict) and isinstance(pool.get("batching"), dict) and isinstance(whole, dict):
            table = {"batching": dict(whole)}
            merge(table, {"batching": pool["batching"]})
            pool = {**pool, **table}
        complete.append(pool)
    tree["fleet"] = {**fleet, "pools": complete}


def dumps(config: Config) -> str:
    """The configuration as TOML, every default spelled out; `load` of it gives an equal configuration, but for `run.out`: a run
    overwrites no other, so whoever repeats one says where to."""
    tree = msgspec.to_builtins(config)
    tree["run"]["out"] = None
    for name in POLICY_TABLES:
        policy = getattr(config, name)
        if not _is_ours(name, policy):
            tree[name]["kind"] = f"{type(policy).__module__}:{type(policy).__qualname__}"
    return tomli_w.dumps(_without_none(tree))


def _own_policy(where: str, name: str, table: dict[str, Any]) -> Any:
    """A user's policy: `kind = "package.module:Class"`, the other keys are its fields."""
    module, _, attribute = str(table["kind"]).partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's does when it is imported
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {name}.kind = {shown(table['kind'])} cannot be imported: {shown(why, str)}") from None
    if not (isinstance(policy, type) and issubclass(policy, Struct)):
        raise ConfigError(f"{where}: {name}.kind = {shown(table['kind'])} is no msgspec.Struct, as a policy must be")
    fields = {key: value for key, value in table.items() if key != "kind"}
    try:
        return msgspec.convert(fields, policy)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{where}: {name} ({table['kind']}): {error}") from None


def _is_ours(name: str, policy: Any) -> bool:
    return isinstance(policy, get_args(get_type_hints(Config)[name]) or get_type_hints(Config)[name])


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is not set is left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return _without_none(value) if isinstance(value, dict) else value

    return {name: plain(value) for name, value in tree.items() if value is not None}
