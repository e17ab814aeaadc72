"""Windows through which route, scale and load policies see the fleet, and what the machines expect of such a policy.

The router's and controller's own records satisfy the views: nothing is copied or wrapped. Knows no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from squall.core.types import Nanos, ReplicaId, Request, Role


class ReplicaView(Protocol):
    """What the router knows of a replica that takes requests; it changes only at dispatch, first token, preemption and finish.

    Attributes:
        num_waiting: requests sent there that have no token from there yet.
        num_running: requests that have, and are unfinished.
        num_preempted: of the running ones, those that lost their KV since and wait again.
        num_tokens: prompt tokens of all its unfinished requests.
        num_promised: KV, in tokens, that its requests may come to need: prompts and longest outputs.
        num_blocks, block_size: its KV pool.
    """

    @property
    def replica(self) -> ReplicaId: ...
    @property
    def num_promised(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_preempted(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...


class RouteView(Protocol):
    """The replicas that may get the next request, and what the router remembers for the policy.

    Attributes:
        replicas: in ascending id; at least one.
        num_sent: requests sent so far, to any replica.
        lowest: of a policy that has `rank` too, the replica that it puts first, in O(log R); None where it takes none.
    """

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...
    @property
    def num_sent(self) -> int: ...
    @property
    def lowest(self) -> ReplicaView | None: ...

    def get(self, replica: ReplicaId, /) -> ReplicaView | None:
        """The one of `replicas` with this id, where there is one."""

    def longest_prefix(self, request: Request, /) -> tuple[int, Sequence[ReplicaView]]:
        """The longest beginning of the prompt that is known to have been sent: how many blocks, and the few that got it last.

        Kept for a policy that says `prefix_apart`: how many tokens from one remembered place to the next. Otherwise (0, ()).
        """


@runtime_checkable
class RankPolicy(Protocol):
    """The replica with the lowest rank gets the next request; on a tie the lowest id does. The router keeps the index.

    `rank` must depend on the replica alone. None: it takes nothing now, the request keeps waiting.
    """

    def rank(self, replica: ReplicaView, /) -> float | None: ...


@runtime_checkable
class ChoosePolicy(Protocol):
    """Chooses one of `view.replicas` for `request`, by its id. None: the request keeps waiting.

    It may have `rank` as well, for `view.lowest`, and `prefix_apart`, for `view.longest_prefix`.
    """

    def choose(self, request: Request, view: RouteView, /) -> ReplicaId | None: ...


RoutePolicy = RankPolicy | ChoosePolicy


# -- scale: how many replicas there should be


class DemandView(Protocol):
    """What is asked of the replicas of one role; the router's own counts, summed up when the controller looks.

    Attributes:
        num_queued: requests that no replica of the role has yet (at the router; for DECODE, in the hand-off queue).
        num_queued_tokens: their prompt tokens (for DECODE, the tokens whose KV waits).
        oldest_queued_at: since when the first of them waits there; None where none does.
        num_waiting: requests at replicas that have no token from there yet; a preempted one is not among them.
        num_waiting_tokens: their prompt tokens.
        num_running: requests at replicas that have one.
        num_promised_tokens: KV that all requests at replicas may come to need: prompt and longest output.
        num_arrived, num_arrived_tokens: requests and their prompt tokens since the beginning; refused ones count.
    """

    @property
    def num_queued(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def oldest_queued_at(self) -> Nanos | None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_promised_tokens(self) -> int: ...
    @property
    def num_arrived(self) -> int: ...
    @property
    def num_arrived_tokens(self) -> int: ...


class RoleView(Protocol):
    """The replicas of one role, and what is asked of them. What is not known is None, which is never the same as zero.

    Attributes:
        role: BOTH, or PREFILL and DECODE.
        minimum, maximum, initial: replicas that the fleet's configuration allows, and begins with.
        num_ready: take work now.
        num_coming: wanted, and starting, loading or warming; also one that waits to be started again.
        num_draining, num_idle: can be revived for free.
        next_ready_s: after so long the next coming one is expected to take work; None where none comes or nobody knows.
        num_queued ... num_promised_tokens: see `DemandView`.
        num_blocks, block_size: KV blocks of the ready replicas together, and tokens a block; block_size 0 = not known yet.
        arrived_per_s, arrived_tokens_per_s: requests and prompt tokens, over the policy's `window_s`; None until a whole window
            has been seen.
    """

    @property
    def role(self) -> Role: ...
    @property
    def minimum(self) -> int: ...
    @property
    def maximum(self) -> int: ...
    @property
    def initial(self) -> int: ...
    @property
    def num_ready(self) -> int: ...
    @property
    def num_coming(self) -> int: ...
    @property
    def num_draining(self) -> int: ...
    @property
    def num_idle(self) -> int: ...
    @property
    def next_ready_s(self) -> float | None: ...
    @property
    def num_queued(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def oldest_queued_at(self) -> Nanos | None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_promised_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def arrived_per_s(self) -> float | None: ...
    @property
    def arrived_tokens_per_s(self) -> float | None: ...

    def past_tokens_per_s(self, ago_s: float, /) -> float | None:
        """As `arrived_tokens_per_s`, for the window that ended so long ago (a season before, say).

        Kept for a policy that says `memory_s`: how far back it looks. None before the beginning, and further back than that.
        """

    def mean_unfinished(self, window_s: float, /) -> float | None:
        """Mean number of unfinished requests (queued, waiting and running) over the last `window_s`, weighted by time.

        Kept for a policy that says `concurrency_s`: its longest window. None until a whole window has been seen.
        """


class Capacity(Struct, frozen=True):
    """What one replica can do, given in the configuration or derived from latency model, links and memory.

    Attributes:
        prefill_tokens_per_s: prompt tokens that it computes.
        decode_tokens_per_s: output tokens that it yields with a full batch.
        transfer_tokens_per_s: tokens whose KV leaves it.
        num_blocks, block_size: its KV pool.
        load_s: from nothing to ready.
        derived: the names of those fields that were worked out rather than given.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    transfer_tokens_per_s: float
    num_blocks: int
    block_size: int
    load_s: float
    derived: tuple[str, ...] = ()


class ScaleView(Protocol):
    """What a scale policy may see of the fleet.

    Attributes:
        now: this instant.
        began_at: the instant at which the controller began; schedules count from it.
        roles: one entry for every role of the fleet: BOTH, or PREFILL and DECODE.
        capacity: of one replica; None where nobody knows it (a policy that needs it wants what there is).
    """

    @property
    def now(self) -> Nanos: ...
    @property
    def began_at(self) -> Nanos: ...
    @property
    def roles(self) -> Mapping[Role, RoleView]: ...
    @property
    def capacity(self) -> Capacity | None: ...


class Wanted(Struct, frozen=True):
    """A scale policy's answer: replicas of every role that it has an opinion about, and one line that says why, for all roles
    or for each."""

    counts: dict[Role, int]
    why: str | dict[Role, str]

    def why_of(self, role: Role) -> str:
        return self.why if isinstance(self.why, str) else self.why.get(role, "")


class ScalePolicy(Protocol):
    """How many replicas there should be: arithmetic. Bounds, cooldowns and victims are the controller's business.

    It may have `window_s` (of the arrival rates, 10 by default), `memory_s` (see `RoleView.past_tokens_per_s`), `concurrency_s`
    (see `RoleView.mean_unfinished`), and `constant = True` where its answer never changes: then it is asked once, and the
    controller never wakes for it. `reactive = True` where it answers by what there is to do, not by a clock or a forecast: then
    a size that was too small is not tried again before less arrives.
    """

    def __call__(self, view: ScaleView, /) -> Wanted: ...


# -- load: how weights come to a replica


class Place(Struct, frozen=True):
    """Where weights lie: on the GPUs of a replica, in the DRAM or on the SSD of a node, or in the store of the whole cluster.

    `id` is the replica or the node; 0 for the store.
    """

    kind: Literal["gpu", "host", "ssd", "store"]
    id: int = 0


STORE = Place("store")


class Transfer(Struct, frozen=True):
    """Weights on their way from where they lie to one or more replicas.

    Attributes:
        model: whose weights.
        source: where they come from.
        path: the replicas that get them, in the order in which each forwards them to the next one (one, but for chains).
        kind: "disk" (store or SSD), "host", "p2p", "chain" (forwarded layer by layer), "striped" (each source sends a share of
            every layer, the targets exchange shares inside their NVLink domain) or "mock" (takes `seconds`).
        live_partner: the replica that the last one of `path` relieves while it loads.
        more_sources: of a striped transfer, the sources of the other stripes.
        seconds: of a mock, how long it takes.
    """

    model: str
    source: Place
    path: tuple[ReplicaId, ...]
    kind: Literal["disk", "host", "p2p", "chain", "striped", "mock"]
    live_partner: ReplicaId | None = None
    more_sources: tuple[Place, ...] = ()
    seconds: float | None = None

    @property
    def named_sources(self) -> str:
        """For people: "gpu 0, gpu 1"."""
        places = (self.source, *self.more_sources)
        return ", ".join(place.kind if place.kind == "store" else f"{place.kind} {place.id}" for place in places)


class SlotView(Protocol):
    """One place for a replica, and what joins it to others.

    Attributes:
        role: of the replica that is, or comes, there.
        node: the machine; `domain`: the NVLink domain (equal numbers are joined); `leaf`: the switch that its node hangs on.
        nic_bytes_per_s: to other nodes, a direction, for all GPUs of the replica; `link_bytes_per_s`: inside the domain.
    """

    @property
    def replica(self) -> ReplicaId: ...
    @property
    def role(self) -> Role: ...
    @property
    def node(self) -> int: ...
    @property
    def domain(self) -> int: ...
    @property
    def leaf(self) -> int: ...
    @property
    def nic_bytes_per_s(self) -> float: ...
    @property
    def link_bytes_per_s(self) -> float: ...


class SourceView(SlotView, Protocol):
    """A replica that holds whole weights and may send them.

    Attributes:
        sends_kv: its outgoing link carries KV (a prefill replica of a disaggregated fleet).
        num_sending: transfers that leave it now.
        num_outstanding: requests that it has.
    """

    @property
    def sends_kv(self) -> bool: ...
    @property
    def num_sending(self) -> int: ...
    @property
    def num_outstanding(self) -> int: ...


class LoadView(Protocol):
    """What a load policy may see when weights must come to `targets`.

    Attributes:
        now: this instant.
        model: whose weights; `weight_bytes`: their size, all GPUs of a replica together.
        num_layers: of the model; a chain forwards them one by one.
        targets: the replicas to load now, in ascending id; at least one.
        sources: the replicas that hold whole weights and stay, in ascending id.
        overloaded: replicas that a target could relieve while it loads, the most loaded first.
        host_copies: nodes with the weights in DRAM, and when they were last used there.
        ssd_copies: nodes with the weights on their SSD.
        host_bytes_per_s, ssd_bytes_per_s, store_bytes_per_s: what one replica reads from each, when it is alone.
    """

    @property
    def now(self) -> Nanos: ...
    @property
    def model(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def targets(self) -> Sequence[SlotView]: ...
    @property
    def sources(self) -> Sequence[SourceView]: ...
    @property
    def overloaded(self) -> Sequence[ReplicaId]: ...
    @property
    def host_copies(self) -> Mapping[int, Nanos]: ...
    @property
    def ssd_copies(self) -> frozenset[int]: ...
    @property
    def host_bytes_per_s(self) -> float: ...
    @property
    def ssd_bytes_per_s(self) -> float: ...
    @property
    def store_bytes_per_s(self) -> float: ...


class LoadPolicy(Protocol):
    """Plans how weights come to all `view.targets`: every target is in the path of exactly one of the transfers.

    It may have `host_ttl_s`: for how long a node keeps the copy in its DRAM after the last use (for ever by default).
    """

    def __call__(self, view: LoadView, /) -> Sequence[Transfer]: ...
