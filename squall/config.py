"""The one configuration tree of all commands, read from TOML.

Knows files, keys and overrides, and how to say which key is wrong. Does not know what a value does: every table is read by
the module it configures, and a policy's table is the policy itself.
"""

from __future__ import annotations

from msgspec import Struct, field

from squall.policies.batching import Batching, Vllm
from squall.policies.load import Disk, Load
from squall.policies.route import LeastLoaded, Route
from squall.policies.scale import Fixed, Scale
from squall.workload.spec import Workload


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: a catalogue name, or the path of a config.json or of a checkpoint directory."""

    name: str = "smollm2-135m-instruct"
    served_as: tuple[str, ...] = ()  # names that clients may use; the model's own name when empty


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """What there is to run on. `gpu` is a catalogue name; "cpu" is this machine."""

    gpu: str = "cpu"
    nodes: int = 1
    gpus_per_node: int = 8
    usd_per_gpu_hour: float | None = None  # overrides the catalogue's price


class ReplicaSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one replica. `num_blocks` overrides what the memory model says."""

    tp: int = 1
    pp: int = 1
    block_size: int = 16
    kv_dtype: str = "auto"
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    max_model_len: int | None = None  # the model's own when None


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    mode: str = "colocated"
    replicas: int = 1


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """The router's waiting room, bounded in requests and in prompt tokens."""

    max_requests: int = 4096
    max_tokens: int = 16_000_000
    max_retries: int = 2  # how often a request may lose its replica


class Latency(Struct, frozen=True, forbid_unknown_fields=True):
    """`kind`: "auto", "roofline" or "profile" (then `path` names the profile)."""

    kind: str = "auto"
    path: str | None = None
    overhead_s: float | None = None  # per step, over the GPU's own time; None: the source's


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None
    attainment: float = 0.99


class Serve(Struct, frozen=True, forbid_unknown_fields=True):
    """The live body. `engine`: "torch" or "emulated" (which sleeps for predicted times, stretched by `time_dilation`)."""

    host: str = "127.0.0.1"
    port: int = 8000
    engine: str = "torch"
    device: str = "cpu"
    compute_threads: int = 1
    api_keys: tuple[str, ...] = ()
    drain_timeout_s: float = 30.0
    time_dilation: float = 1.0
    vllm_metrics: bool = True
    event_log: bool = True


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    seed: int = 0
    out: str | None = None  # run directory; made from the command and the time when None


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    replica: ReplicaSpec = field(default_factory=ReplicaSpec)
    fleet: Fleet = field(default_factory=Fleet)
    batching: Batching = field(default_factory=Vllm)
    route: Route = field(default_factory=LeastLoaded)
    queue: Queue = field(default_factory=Queue)
    scale: Scale = field(default_factory=Fixed)
    load: Load = field(default_factory=Disk)
    workload: Workload | None = None
    latency: Latency = field(default_factory=Latency)
    slo: Slo = field(default_factory=Slo)
    serve: Serve = field(default_factory=Serve)
    run: Run = field(default_factory=Run)
