"""The tables of the configuration that say how large the fleet may be, how its replicas come up, and what goes wrong on purpose.

Knows of no policy what it does, and no hardware catalogue. `config` puts them into the one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, Protocol

from msgspec import Meta, Struct

from squall.core.fleet_plan import Bounds
from squall.core.types import Role
from squall.policies.batching import Batching
from squall.policies.scale import Schedule
from squall.quantities import Blocks, Delay, Fraction, Gpus, NotNegative, Rate, Seconds, counted

NAMES: Final = {Role.BOTH: "replicas", Role.PREFILL: "prefill", Role.DECODE: "decode"}
"""The keys of roles, in `[fleet]` and in the steps of a schedule."""

UNUSED: Final[dict[str, tuple[str, ...]]] = {"colocated": ("prefill", "decode"), "disaggregated": ("replicas",)}
"""The keys of roles that a fleet of each mode does not have."""

MOST_REPLICAS: Final = 100_000

SLOWEST: Final = 10_000
"""So many times as slow as it should be no replica is."""

Size = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
MaybeNone = Annotated[int, Meta(ge=0, le=MOST_REPLICAS)]
Left = Annotated[float, Meta(ge=0, lt=1)]  # of the rate of a link, or of the speed of a replica
Chances = Annotated[float, Meta(ge=0, le=3600)]  # an hour: above one a second nothing would ever come up


class Replicas(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas there may be; the fleet begins with `initial` (the minimum, but at least one, when None)."""

    min: MaybeNone
    max: Size
    initial: MaybeNone | None = None

    @property
    def bounds(self) -> Bounds:
        initial = self.initial if self.initial is not None else max(self.min, 1)
        return Bounds(self.min, self.max, initial)


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """Some replicas of a fleet whose replicas are not all alike. What is None is as `[cluster]`, `[replica]`, `[batching]` say.

    Attributes:
        replicas: how many.
        node: a machine of the catalogue, for links; `cluster.node` where the GPU is that of `[cluster]`.
        usd_per_gpu_hour: instead of the catalogue's; `cluster.usd_per_gpu_hour` where the GPU is that of `[cluster]`.
        batching: in the file only what differs from `[batching]`; another `kind` starts anew.
    """

    replicas: Size = 1
    gpu: str | None = None
    node: str | None = None
    usd_per_gpu_hour: Delay | None = None
    tp: Gpus | None = None
    pp: Gpus | None = None
    ep: Gpus | None = None
    num_blocks: Blocks | None = None
    gpu_memory_utilization: Fraction | None = None
    batching: Batching | None = None


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas, and how they share the work.

    The last four keys damp every scale policy: how soon it may want more again, over how long it must have wanted fewer, how long
    a replica without work keeps its weights, and after how long one that does not come up is given up.

    `drain` says what becomes of the requests of a replica that goes: it finishes them, or moves them to others with their KV. A
    move costs its request a gap between two tokens and the links some bytes; waiting costs the GPU up to a longest answer. Fleets
    shrink when little is asked of them and most answers take seconds, so waiting is the default.
    """

    mode: Literal["colocated", "disaggregated"] = "colocated"
    replicas: Size | Replicas = 1  # of a colocated fleet
    prefill: Size | Replicas = 1  # of a disaggregated one
    decode: Size | Replicas = 1
    up_interval_s: Annotated[float, Meta(ge=0.001)] = (
        0.1  # BlitzScale decides all the time (OSDI 2025); ten times a second is enough for its bursts
    )
    down_window_s: Seconds = 30.0
    idle_ttl_s: Seconds = 1.0  # BlitzScale's templates: 0.333 s on one GPU, up to 1.5 s on four
    start_timeout_s: Seconds = 600.0
    drain: Literal["wait", "move"] = "wait"
    pools: tuple[Pool, ...] = ()  # of a colocated fleet whose replicas are not alike, instead of `replicas`

    @property
    def bounds(self) -> dict[Role, Bounds]:
        """Of every role of the fleet."""
        if self.pools:
            return {Role.BOTH: _bounds(sum(pool.replicas for pool in self.pools))}
        if self.mode == "colocated":
            return {Role.BOTH: _bounds(self.replicas)}
        return {Role.PREFILL: _bounds(self.prefill), Role.DECODE: _bounds(self.decode)}

    @property
    def moves_kv(self) -> bool:
        """KV of requests goes from one replica to another."""
        return self.mode == "disaggregated" or self.drain == "move"

    @property
    def num_initial(self) -> int:
        """Replicas with which the fleet begins."""
        return sum(bounds.initial for bounds in self.bounds.values())

    @property
    def num_maximum(self) -> int:
        """The most replicas that there may be."""
        return sum(bounds.maximum for bounds in self.bounds.values())


class Handoff(Struct, frozen=True, forbid_unknown_fields=True):
    """How a disaggregated fleet hands requests from prefill to decode replicas.

    Attributes:
        delay_s: every hand-off takes so long, whatever the size and whoever else sends (the seed's mock_transfer_millis);
            None: as long as KV needs on the cluster's links.
        max_transfers: a replica sends, and receives, so many hand-offs at once; the others wait, first come, first sent. Not
            where each takes `delay_s`.
        max_share: a decode replica is promised so much of its KV pool at most, prompts and longest outputs counted. 1 promises
            nothing that it does not have, and nobody is preempted; more counts on outputs that are shorter than they may be.
        max_ratio: one that was promised more than so many times the mean of all decode replicas, and half of its pool, gets
            nothing more until it falls below.
    """

    delay_s: Delay | None = None
    max_transfers: Annotated[int, Meta(ge=1)] = 4
    max_share: Annotated[float, Meta(gt=0)] = 1.0
    max_ratio: Annotated[float, Meta(ge=1)] = 2.0


def _bounds(replicas: int | Replicas) -> Bounds:
    return Bounds(replicas, replicas, replicas) if isinstance(replicas, int) else replicas.bounds


StartPhase = Literal["process", "context", "capture", "jit"]


class Startup(Struct, frozen=True, forbid_unknown_fields=True):
    """What a new replica goes through besides its weights, phase by phase. By default everything is there already.

    Each phase is warm (prepared, cached) or cold, and then takes the longer one of its pair.

    Attributes:
        cold: all phases are cold, or those that are named.
        process_s, cold_process_s: a process that answers. Cold: container, interpreter and libraries (13.8 s in all for vLLM as
            measured for BlitzScale's figure 23, less `context` and `capture`); warm: from a pool of processes.
        context_s, cold_context_s: the CUDA context (500 ms, BlitzScale section 5); warm: kept in the pool.
        capture_s, cold_capture_s: CUDA graphs are captured, after the weights; warm: graphs that were saved.
        jit_s, cold_jit_s: kernels are compiled just in time, after that; warm: their cache was moved along. Nothing where an
            engine brings its kernels, and minutes where it does not (a deployment saw 7 min in all against 1 min 44 s).
        stop_s: until its GPUs are free.
    """

    cold: bool | tuple[StartPhase, ...] = False
    process_s: Delay = 0.0
    cold_process_s: Delay = 10.0
    context_s: Delay = 0.0
    cold_context_s: Delay = 0.5
    capture_s: Delay = 0.0
    cold_capture_s: Delay = 3.0
    jit_s: Delay = 0.0
    cold_jit_s: Delay = 0.0
    stop_s: Delay = 0.0

    def phase_s(self, phase: StartPhase) -> float:
        is_cold = self.cold if isinstance(self.cold, bool) else phase in self.cold
        seconds: float = getattr(self, f"cold_{phase}_s" if is_cold else f"{phase}_s")
        return seconds

    @property
    def before_weights_s(self) -> float:
        return self.phase_s("process") + self.phase_s("context")

    @property
    def after_weights_s(self) -> float:
        return self.phase_s("capture") + self.phase_s("jit")


class Capacities(Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica can do, for scale policies that want to know. What is not given is worked out."""

    prefill_tokens_per_s: Rate | None = None
    decode_tokens_per_s: Rate | None = None
    transfer_tokens_per_s: Rate | None = None
    load_s: Delay | None = None


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong in a simulation, on purpose.

    Attributes:
        at_s: when.
        kind: "replica" (it dies), "node" (it goes, after `notice_s` where that is given: spot reclaim), "link" (the node's
            network and disks give only `factor` of their rate; 0 is a link that is lost, and what is on it waits), "slow" (the
            steps of whatever runs in that replica's place take 1 / `factor` times as long, in whole numbers).
        which: the replica or the node.
        duration_s: until a node comes back, or a link or a replica is as fast as before; for ever when None.
    """

    at_s: Delay
    kind: Literal["replica", "node", "link", "slow"]
    which: NotNegative
    duration_s: Seconds | None = None
    notice_s: Delay = 0.0
    factor: Left = 0.5


class Hazards(Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong by chance in a simulation, so many times an hour on average, each as the fault of its kind.

    Kinds do not know of each other: one that is added strikes between the others, and changes none of them.

    Attributes:
        replica_per_hour: of every replica, that it dies.
        node_per_hour, node_back_s, notice_s: of every node, that it goes; until it is back; before it goes.
        link_lost_per_hour, link_lost_s: of every node, that its links are lost; for so long on average.
        link_per_hour, link_s, link_factor: of every node, that its links are slow; likewise; what is left of their rate.
        slow_per_hour, slow_s, slow_factor: of every replica, that it is a straggler; likewise; what is left of its speed.

    Durations are exponentially distributed.
    """

    replica_per_hour: Chances = 0.0
    node_per_hour: Chances = 0.0
    node_back_s: Seconds = 300.0
    notice_s: Delay = 0.0
    link_lost_per_hour: Chances = 0.0
    link_lost_s: Seconds = 60.0
    link_per_hour: Chances = 0.0
    link_s: Seconds = 60.0
    link_factor: Left = 0.5
    slow_per_hour: Chances = 0.0
    slow_s: Seconds = 60.0
    slow_factor: Left = 0.5

    @property
    def may_strike(self) -> bool:
        """Whether anything can go wrong by chance."""
        return any(getattr(self, name) for name in self.__struct_fields__ if name.endswith("_per_hour"))

    @property
    def longest_s(self) -> float:
        """By then what has gone wrong is whole again: a duration is never twenty times its mean."""
        lost = 2 * (self.notice_s + self.node_back_s) if self.node_per_hour else 0.0
        lasting = (
            (self.link_lost_per_hour, self.link_lost_s),
            (self.link_per_hour, self.link_s),
            (self.slow_per_hour, self.slow_s),
        )
        return max(lost, *(20 * mean_s for per_hour, mean_s in lasting if per_hour), 0.0)


class _Cluster(Protocol):
    @property
    def gpu(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...


class _Replica(Protocol):
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...


def num_slots(cluster: _Cluster, replica: _Replica) -> int:
    """Replicas that the cluster has GPUs for: none of them shares a node's rest with another one."""
    gpus = replica.tp * replica.pp
    per_node = cluster.gpus_per_node // gpus
    return cluster.nodes * per_node if per_node else cluster.nodes // -(-gpus // cluster.gpus_per_node)


def faults_mistake(faults: Sequence[Fault], hazards: Hazards, fleet: Fleet, cluster: _Cluster, replica: _Replica) -> str | None:
    """A fault of something that there never is, or that changes nothing. A replica has the number of its place: a fleet may use
    them all."""
    places = fleet.num_maximum if cluster.gpu.lower() == "cpu" else max(fleet.num_maximum, num_slots(cluster, replica))
    for index, fault in enumerate(faults):
        what, num = ("node", cluster.nodes) if fault.kind in ("node", "link") else ("replica", places)
        if fault.which >= num:
            return f"faults[{index}].which = {fault.which}: there is no such {what}; they are counted from 0 to {num - 1}"
        if fault.kind == "slow" and (mistake := _slow_mistake(f"faults[{index}].factor", fault.factor)) is not None:
            return mistake
    return _slow_mistake("hazards.slow_factor", hazards.slow_factor)


def _slow_mistake(key: str, factor: float) -> str | None:
    if factor * SLOWEST < 1:
        return f'{key} = {factor}: expected at least {1 / SLOWEST}; a replica that stands still is a lost one, kind = "replica"'
    if round(1 / factor) == 1:
        return f"{key} = {factor} changes nothing: steps take a whole number of times as long; choose 0.5, 0.33 or less"
    return None


def fleet_mistake(fleet: Fleet, cluster: _Cluster, replica: _Replica) -> str | None:
    """What cannot be meant: the key, what is wrong and what would be right. On "cpu" there is no budget of GPUs.

    Nor is there one with pools: each brings the machines that it needs.
    """
    if fleet.pools:
        if fleet.mode != "colocated":
            return f"fleet.mode = {fleet.mode!r} cannot have [[fleet.pools]]; replicas that are not alike are colocated ones"
        if fleet.replicas != 1:
            return "fleet.replicas and [[fleet.pools]] both say how many replicas there are; leave one out (pools do not scale)"
        return _crowd(fleet)
    for name in UNUSED[fleet.mode]:
        if getattr(fleet, name) != 1:
            used = "fleet.replicas" if fleet.mode == "colocated" else "fleet.prefill and fleet.decode"
            return f"fleet.{name} means nothing where fleet.mode = {fleet.mode!r}; there it is {used}"
    names = {role: f"fleet.{name}" for role, name in NAMES.items()}
    for role, bounds in fleet.bounds.items():
        if bounds.minimum > bounds.maximum:
            return f"{names[role]}: min = {bounds.minimum} is more than max = {bounds.maximum}; lower min or raise max"
        if not bounds.minimum <= bounds.initial <= bounds.maximum:
            within = f"from min = {bounds.minimum} to max = {bounds.maximum}"
            return f"{names[role]}: initial = {bounds.initial} is out of bounds; choose a number {within}"
    if len({bounds.minimum == 0 for bounds in fleet.bounds.values()}) > 1:
        zero = next(names[role] for role, bounds in fleet.bounds.items() if not bounds.minimum)
        return f"{zero}.min = 0 lets the role vanish while the other one serves; set it to 1, or both to 0"
    if len({bounds.initial == 0 for bounds in fleet.bounds.values()}) > 1:
        zero = next(names[role] for role, bounds in fleet.bounds.items() if not bounds.initial)
        return f"{zero}.initial = 0 begins with the other role alone; set it to 1, or both to 0"
    if cluster.gpu.lower() == "cpu":
        return _crowd(fleet)
    slots, gpus = num_slots(cluster, replica), replica.tp * replica.pp
    every = fleet.bounds.values()
    least = sum(bounds.minimum for bounds in every)  # roles share the GPUs: one may take all that the others can spare
    most = max(fleet.num_initial, *(least - bounds.minimum + bounds.maximum for bounds in every))
    if most > slots:
        have = f"{cluster.nodes} x {cluster.gpus_per_node} GPUs have place for {slots}"
        of = f"replicas of {counted(gpus, 'GPU')}"
        return f"[fleet] may grow to {most} {of}, and {have}; raise cluster.nodes, or lower the most replicas"
    return None


def _crowd(fleet: Fleet) -> str | None:
    """A fleet that no budget of GPUs bounds, and that no machine could keep in mind."""
    if fleet.num_maximum > MOST_REPLICAS:
        return f"[fleet] may grow to {fleet.num_maximum} replicas; expected at most {MOST_REPLICAS}"
    return None


def policies_mistake(fleet: Fleet, scale: object, load: object) -> str | None:
    """A policy that has nothing to decide in such a fleet, or decides for roles or numbers that it does not have."""
    name = ", ".join(f"fleet.{NAMES[role]}" for role in fleet.bounds)
    if fleet.pools and getattr(load, "live", False):
        return "load.live means nothing beside [[fleet.pools]], which load nothing; leave it out"
    if not any(bounds.minimum < bounds.maximum for bounds in fleet.bounds.values()) and not getattr(scale, "constant", False):
        fix = "pools do not scale" if fleet.pools else f"give {name} bounds, such as {{ min = 1, max = 4 }}"
        return f"scale.kind means nothing in a fleet of a fixed size; {fix}, or leave [scale] out"
    return _schedule_mistake(fleet, scale) if isinstance(scale, Schedule) else None


def _schedule_mistake(fleet: Fleet, schedule: Schedule) -> str | None:
    for index, step in enumerate(schedule.steps):
        for role, key in NAMES.items():
            count, bounds = step.count(role), fleet.bounds.get(role)
            where = f"scale.steps[{index}].{key} = {count}"
            if count is None:
                continue
            if bounds is None:
                right = " and ".join(NAMES[other] for other in fleet.bounds)
                return f"{where} means nothing where fleet.mode = {fleet.mode!r}; there it is {right}"
            if not bounds.minimum <= count <= bounds.maximum:
                within = f"from min = {bounds.minimum} to max = {bounds.maximum}"
                return f"{where} is out of the bounds of fleet.{key}; choose a number {within}, or change these"
    return None
