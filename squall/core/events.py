"""What has happened. Machines are told of it in these words; each is a frozen Struct named in the past tense.

The same Structs travel over the wire (`live/rpc`) and into the event log. Knows no behaviour.
"""

from enum import Enum

from msgspec import Struct

from squall.core.types import Nanos, ReplicaId, Request, RequestId, Role, RunId


class Event(Struct, frozen=True, gc=False, tag_field="event", tag=True):
    """Base of all events."""


# -- to a replica


class Submitted(Event, frozen=True, gc=False):
    """The router gives `request` to this replica."""

    request: Request


class StepsDone(Event, frozen=True, gc=False):
    """A run ended after `steps` steps (at least 1, at most what was asked).

    `stopped` names the sequences that ended at the last step (EOS, stop string, limit), in ascending id; the engine has
    already freed their KV and forgotten them.
    """

    run: RunId
    steps: int
    stopped: tuple[RequestId, ...] = ()


class Cancelled(Event, frozen=True, gc=False):
    """Nobody wants the request's tokens any more (the client went away, or a deadline passed). To router and replica."""

    request: RequestId


# -- to the router


class Arrived(Event, frozen=True, gc=False):
    """A new request, already validated and tokenised."""

    request: Request


class Held(Struct, frozen=True, gc=False, array_like=True):
    """A request whose prefill is done and that does not decode where that was: its KV waits to go to another replica.

    Attributes:
        num_tokens: tokens whose KV there is.
        head, num_layers: the replica that has the KV of so many first layers, where they were not run here (live scaling).
    """

    request: RequestId
    num_tokens: int
    head: ReplicaId | None = None
    num_layers: int = 0


class Progressed(Event, frozen=True, gc=False):
    """What the end of a run changed for the requests of `replica`; ids in ascending order.

    `first` produced their first token there, `finished` their last (or were cancelled), `preempted` lost their KV and wait again
    at the replica, `held` are ready to be handed off. A request may be in `first` and in `finished` or `held` at once.
    """

    replica: ReplicaId
    first: tuple[RequestId, ...] = ()
    finished: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    held: tuple[Held, ...] = ()


class ReplicaUp(Event, frozen=True, gc=False):
    """The replica takes requests from now on. `num_blocks` KV blocks of `block_size` tokens each.

    With a `partner` it loads still, and works with that one (live scaling): it takes the place of the partner, which gets
    nothing new until the pair ends.
    """

    replica: ReplicaId
    num_blocks: int
    block_size: int
    role: Role = Role.BOTH
    partner: ReplicaId | None = None


class ReplicaDown(Event, frozen=True, gc=False):
    """The replica takes no new requests. `lost`: what it had is gone too; otherwise it finishes what it has, or moves it.

    `asked`: it was stopped on purpose, which is held against none of its requests. To the router, also when one that was emptied
    ends, and from there to replicas that may wait for KV of a lost one.
    """

    replica: ReplicaId
    lost: bool
    asked: bool = False


class DrainWanted(Event, frozen=True, gc=False):
    """The whole service is shutting down: finish what is here, take nothing new. To the controller, which tells the router."""


# -- to the controller (the life of a replica; see core/lifecycle.py)


class ReplicaStarted(Event, frozen=True, gc=False):
    """The replica's process answers."""

    replica: ReplicaId


class LayerArrived(Event, frozen=True, gc=False):
    """Layer `layer` (0-based) is complete at the replica and its checksum matched."""

    replica: ReplicaId
    layer: int


class WeightsLoaded(Event, frozen=True, gc=False):
    """Embedding, all layers and the head are complete; the KV pool holds `num_blocks` blocks of `block_size` tokens."""

    replica: ReplicaId
    num_blocks: int
    block_size: int


class LoadFailed(Event, frozen=True, gc=False):
    """The weights could not be loaded; `reason` is one line for a person."""

    replica: ReplicaId
    reason: str


class Warmed(Event, frozen=True, gc=False):
    """A step may now run at full speed."""

    replica: ReplicaId


class Emptied(Event, frozen=True, gc=False):
    """The last request left a draining replica, says the router."""

    replica: ReplicaId


class ReplicaLost(Event, frozen=True, gc=False):
    """The replica's process died or stopped answering. `steps`: how many of its current run are known to be done."""

    replica: ReplicaId
    reason: str
    steps: int = 0


class ReplicaStopped(Event, frozen=True, gc=False):
    """The replica's process ended as it was asked to."""

    replica: ReplicaId


class NoticeGiven(Event, frozen=True, gc=False):
    """The replica's process was told to end, and serves for `notice` more at most, says that process."""

    replica: ReplicaId
    notice: Nanos


class Stirred(Event, frozen=True, gc=False):
    """A request came to a router that had none, says the router of an elastic fleet: the controller looks again."""


class ScaleWanted(Event, frozen=True, gc=False):
    """Somebody wants `count` replicas of a role, whatever the policy says; None gives the decision back to the policy."""

    role: Role
    count: int | None = None


class NodeDown(Event, frozen=True, gc=False):
    """The node goes at `at`, and takes no replicas meanwhile: it is reclaimed with notice, or gone already.

    Whatever replica it has then is reported lost, each by its own event.
    """

    node: int
    at: Nanos


class NodeUp(Event, frozen=True, gc=False):
    """The node takes replicas again."""

    node: int


# -- from the controller of one fleet to those of the others on the same cluster


class GpusHeld(Event, frozen=True, gc=False):
    """Another fleet on the cluster has these GPUs from now on, and no others: they are numbered through, node by node.

    In the memory of the nodes `copies` it has its weights, `copy_bytes` in each, and needs them there.
    """

    fleet: int
    gpus: tuple[int, ...]
    copies: tuple[int, ...] = ()
    copy_bytes: int = 0


# -- KV on its way from one replica to another


class Part(Struct, frozen=True, gc=False, array_like=True):
    """Who has which layers of a request's KV: from `first_layer` up to (not including) `last_layer`; 0 = to the last one."""

    source: ReplicaId
    first_layer: int = 0
    last_layer: int = 0


class Offered(Event, frozen=True, gc=False):
    """The router offers a request to the replica that is to decode it: it takes blocks for `num_tokens` tokens when it can, and
    asks each of `parts` for its layers (`KvWanted`)."""

    request: Request
    num_tokens: int
    parts: tuple[Part, ...]


class KvWanted(Event, frozen=True, gc=False):
    """`to` has blocks for the KV of a request that this replica holds: send it."""

    request: RequestId
    to: ReplicaId
    first_layer: int = 0
    last_layer: int = 0


class KvSent(Event, frozen=True, gc=False):
    """The KV of a request is at `to`. To the replica that sent it, by its driver.

    Attributes:
        num_bytes, took: what was sent and how long that took, for the record; 0 where nobody measured.
        path: the links that it passed, those of all GPUs.
    """

    request: RequestId
    to: ReplicaId
    num_bytes: int = 0
    took: Nanos = 0
    path: tuple[str, ...] = ()


class KvFailed(Event, frozen=True, gc=False):
    """It could not be sent. To the replica that sent it by its driver, and from there to `to`: these layers do not come."""

    request: RequestId
    to: ReplicaId
    first_layer: int = 0
    last_layer: int = 0


class KvArrived(Event, frozen=True, gc=False):
    """Layers from `first_layer` up to (not including) `last_layer` of a request's KV are here; 0 = to the last one."""

    request: RequestId
    first_layer: int
    last_layer: int


class Dropped(Event, frozen=True, gc=False):
    """`by`, the other end of a hand-off, is gone. Who has the request's KV, whole, keeps it; who has not says `NotHeld`."""

    request: RequestId
    by: ReplicaId


class MoveWanted(Event, frozen=True, gc=False):
    """These requests of a replica that is to be empty have a place elsewhere, says the router. At the next boundary who decodes
    is held (`Progressed`), for that place to fetch its KV; who does not is given back (`Surrendered`)."""

    requests: tuple[RequestId, ...]


class ReturnWanted(Event, frozen=True, gc=False):
    """The replica is to be empty: it gives these requests back (`Surrendered`), but for those that have come to decode."""

    requests: tuple[RequestId, ...]


class KeepWanted(Event, frozen=True, gc=False):
    """Nobody else takes these requests, which the replica holds: it decodes them itself again, and says so (`Kept`)."""

    requests: tuple[RequestId, ...]


class RoleChanged(Event, frozen=True, gc=False):
    """`replica` has this role from now on. To itself and to the router."""

    replica: ReplicaId
    role: Role


# ... and what the router hears of it


class Adopted(Event, frozen=True, gc=False):
    """The KV of a request that was offered to `replica` is there; it decodes from the next step on."""

    replica: ReplicaId
    request: RequestId


class NotHeld(Event, frozen=True, gc=False):
    """`replica` has no KV of the request, whatever the router thinks: after `Dropped`."""

    replica: ReplicaId
    request: RequestId


class HandoffFailed(Event, frozen=True, gc=False):
    """`replica` could not send the request's KV to `to`, and holds it still."""

    replica: ReplicaId
    request: RequestId
    to: ReplicaId


class Kept(Event, frozen=True, gc=False):
    """`replica` held these requests and decodes them itself now: its role has changed, or they were to stay. Nobody had asked for
    their KV."""

    replica: ReplicaId
    requests: tuple[RequestId, ...]


# -- live scaling: to the two replicas of a pair (see core/live_scaling.py), and what they say


class LivePaired(Event, frozen=True, gc=False):
    """`target`, which loads, and `source`, which is overloaded, work together from now on. To both."""

    target: ReplicaId
    source: ReplicaId
    num_layers: int


class Unpaired(Event, frozen=True, gc=False):
    """They work alone again: the target has its weights and nothing of the pair's is left there, or (`lost`) one is gone."""

    target: ReplicaId
    source: ReplicaId
    lost: bool = False


class LayersDone(Event, frozen=True, gc=False):
    """The layers of `batch` up to (not including) `last_layer` are done. After the model's last layer every request has a
    token; `stopped` names those that ended with it, in ascending id."""

    batch: int
    last_layer: int
    stopped: tuple[RequestId, ...] = ()


class PullWanted(Event, frozen=True, gc=False):
    """The source is idle and has set aside so many KV blocks. The target answers with exactly one of the next two."""

    source: ReplicaId
    num_blocks: int


class HandedOver(Event, frozen=True, gc=False):
    """The batch is the source's from now on: layers before `layer` have run. With `layer` 0 that is all; otherwise its
    activations follow (`ActivationsArrived`), and the KV of those layers, a request each (`KvArrived`)."""

    target: ReplicaId
    batch: int
    layer: int
    requests: tuple[Request, ...]


class NothingLeft(Event, frozen=True, gc=False):
    """There is no batch to pull, until `BatchFormed`; or (`num_blocks` is not 0) the next one needs so many blocks."""

    num_blocks: int = 0


class BatchFormed(Event, frozen=True, gc=False):
    """After `NothingLeft`: there is something to pull again."""


class ActivationsSent(Event, frozen=True, gc=False):
    """The activations of a batch are at the source. To the target, by its driver."""

    batch: int


class ActivationsFailed(Event, frozen=True, gc=False):
    """They could not be sent. To the target by its driver, and from there to the source."""

    batch: int


class ActivationsArrived(Event, frozen=True, gc=False):
    """The source may go on with the batch."""

    batch: int


class TakenOver(Event, frozen=True, gc=False):
    """The source says to the router that it has these requests of `target` now."""

    replica: ReplicaId
    target: ReplicaId
    requests: tuple[RequestId, ...]


class Surrendered(Event, frozen=True, gc=False):
    """The replica gives these requests back to the router: it has never begun them, or has lost, or given up, their KV."""

    replica: ReplicaId
    requests: tuple[RequestId, ...]


class Disowned(Event, frozen=True, gc=False):
    """Somebody else has these requests, says the router to a replica that took them over: drop them without a word."""

    requests: tuple[RequestId, ...]


# -- to any machine


class Woke(Event, frozen=True, gc=False):
    """The instant that the machine asked for with `wake_at` has come."""


AnyEvent = (
    Submitted | StepsDone | Cancelled | Arrived | Progressed | ReplicaUp | ReplicaDown | DrainWanted | ReplicaStarted
    | LayerArrived | WeightsLoaded | LoadFailed | Warmed | Emptied | ReplicaLost | ReplicaStopped | Woke | Stirred
    | ScaleWanted | NodeDown | NodeUp | NoticeGiven | GpusHeld
    | Offered | KvWanted | KvSent | KvFailed | KvArrived | Dropped | RoleChanged | Adopted | NotHeld | HandoffFailed | Kept
    | MoveWanted | ReturnWanted | KeepWanted
    | LivePaired | Unpaired | LayersDone | PullWanted | HandedOver | NothingLeft | BatchFormed
    | ActivationsSent | ActivationsFailed | ActivationsArrived | TakenOver | Surrendered | Disowned
)  # fmt: skip
"""The closed union, for decoding."""


class Rejection(Enum):
    """Why a request is not served. `retryable` ones may succeed later."""

    TOO_LARGE = "too_large"  # could never fit into any replica's KV pool
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NO_CAPACITY = "no_capacity"  # no replica is up and none is coming
    LOST = "lost"  # its replicas died more often than it may be retried

    @property
    def retryable(self) -> bool:
        return self is not Rejection.TOO_LARGE
