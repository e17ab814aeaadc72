"""What a machine wants done. The driver performs every action, in order; each is a frozen Struct in the imperative.

A long action ends in exactly one event: RunSteps in StepsDone (or ReplicaLost), LoadWeights in WeightsLoaded or LoadFailed.
The others are fire-and-forget. Knows no behaviour.
"""

from msgspec import Struct

from squall.core.events import AnyEvent, Rejection
from squall.core.fleet_view import Transfer
from squall.core.types import BlockHash, MachineId, ReplicaId, RequestId, Role, RunId


class Action(Struct, frozen=True, gc=False, tag_field="action", tag=True):
    """Base of all actions."""


class Send(Action, frozen=True, gc=False):
    """Deliver `event` to the machine `to`, at the same instant, after all actions of the current call."""

    to: MachineId
    event: AnyEvent


# -- of a replica, to its engine (or to the simulated world in its place)


class Chunk(Struct, frozen=True, gc=False, array_like=True):
    """A piece of one request's prefill.

    Attributes:
        request: whose.
        offset: tokens whose KV exists before the piece (computed earlier or found in the prefix cache).
        num_tokens: tokens to compute; in a run of several steps each step computes this many.
        num_cached: of `offset`, tokens found in the prefix cache when the request was admitted; set on its first chunk
            only. The engine takes the blocks of the first `num_cached / block_size` hashes of the request's chain.
        last: the prefill is complete after this piece, and the step yields one token for the request.
        num_reserved: on the first chunk, KV blocks that the request holds from now on, if it needs no more.
    """

    request: RequestId
    offset: int
    num_tokens: int
    num_cached: int
    last: bool
    num_reserved: int = 0


class Regrouped(Struct, frozen=True, gc=False, array_like=True):
    """These decodes belong to `group` from now on. Requests that do not decode are meant to be ignored."""

    group: int
    requests: tuple[RequestId, ...]


class RunSteps(Action, frozen=True, gc=False):
    """Run up to `steps` steps. In each, every decode of `group` advances one token and every chunk one piece.

    Decodes come in groups (just one, 0, unless a policy or a pipeline splits them). A request belongs to a run's group after
    its last chunk there, until it stops, is preempted or forgotten, or `regrouped` names it, which takes effect before the
    run. So the decodes need no list: `num_decodes` of them, the whole group, attend to `decode_context` tokens in all (their
    own new one counted) in the first step and to `num_decodes` more each further step. Where `num_decodes` is 0 the group
    pauses: whoever is in it neither advances nor stops. With steps > 1 there is at most one chunk, it is not a last one, and
    its offset advances by `num_tokens` a step.

    The engine ends the run at the end of the first step in which a sequence stops, or at a `Cut`, and reports the steps
    done. It takes new KV blocks from the free ones and, when there are none, those of `evictable`, in this order; of the free
    ones no more than `num_free` (-1: all), as the others are set aside for what is to come from elsewhere. Full
    prompt blocks become shareable under their hash (unless that hash is already held) at the end of the step that
    completes them. `num_copied` KV blocks go to or come from the host's memory before the first step, as the `SwapOut` and
    `SwapIn` since the last run said; the run then has one step. With pipeline stages the next run may be asked for before this
    one has ended, of other requests and with steps = 1. This struct satisfies `BatchShape`, the window that latency models
    look through.
    """

    run: RunId
    steps: int
    num_decodes: int
    decode_context: int
    chunks: tuple[Chunk, ...] = ()
    evictable: tuple[BlockHash, ...] = ()
    group: int = 0
    regrouped: tuple[Regrouped, ...] = ()
    num_copied: int = 0
    num_free: int = -1


class Cut(Action, frozen=True, gc=False):
    """End run `run` at the first step boundary strictly after now. Harmless when it has ended."""

    run: RunId


class Preempt(Action, frozen=True, gc=False):
    """Free these requests' KV; their tokens are kept, they come back as chunks from offset 0 (or the cached part)."""

    requests: tuple[RequestId, ...]


class SwapOut(Action, frozen=True, gc=False):
    """Copy all KV blocks of these requests to the host's memory and free them; they go on later, after `SwapIn`."""

    requests: tuple[RequestId, ...]


class SwapIn(Action, frozen=True, gc=False):
    """Copy the KV of `request` back, into `num_blocks` blocks of its own: free ones and, when there are none, `evictable`.

    Who decoded does so again after the `Join` that follows; of the others the prefill goes on.
    """

    request: RequestId
    num_blocks: int
    evictable: tuple[BlockHash, ...] = ()


class Forget(Action, frozen=True, gc=False):
    """Free these requests' KV and drop all that is known of them (cancelled). Unknown ids are ignored."""

    requests: tuple[RequestId, ...]


class Hold(Action, frozen=True, gc=False):
    """These requests have a token and do not decode: their KV stays as it is until `Join`, `Abandon` or `Forget`."""

    requests: tuple[RequestId, ...]


class Reserve(Action, frozen=True, gc=False):
    """Take KV blocks for `num_tokens` tokens of `request`, from the free ones and, when there are none, those of `evictable`.

    Its KV comes from other replicas, until `Join`; `Abandon` gives the blocks back.
    """

    request: RequestId
    num_tokens: int
    evictable: tuple[BlockHash, ...] = ()


class Evict(Action, frozen=True, gc=False):
    """Drop these cached KV blocks, which nobody uses: they are free from now on."""

    blocks: tuple[BlockHash, ...]


class Join(Action, frozen=True, gc=False):
    """These requests, which were held here or whose KV has come (back), decode with `group` from now on."""

    requests: tuple[RequestId, ...]
    group: int


class SendKv(Action, frozen=True, gc=False):
    """Send a request's KV of `num_tokens` tokens, layers from `first_layer` up to (not including) `last_layer` (0: to the last
    one), to the replica `to`, which has blocks for it; ends in KvSent or KvFailed."""

    request: RequestId
    to: ReplicaId
    first_layer: int
    last_layer: int
    num_tokens: int


class Abandon(Action, frozen=True, gc=False):
    """Drop all that is known of these requests here, without a word to anybody: they go on elsewhere."""

    requests: tuple[RequestId, ...]


class RunLayers(Action, frozen=True, gc=False):
    """Run some layers of a whole prefill, while no steps run; ends in LayersDone.

    The first layer includes the embedding, the model's last one norm, head and sampling. The residual of the batch is kept
    between its layers. `chunks` are complete prompts (offset 0); a request that was cancelled since is missing in later layers.
    This struct satisfies `BatchShape`.
    """

    batch: int
    first_layer: int
    last_layer: int
    chunks: tuple[Chunk, ...]

    @property
    def num_decodes(self) -> int:
        return 0

    @property
    def decode_context(self) -> int:
        return 0


class SendActivations(Action, frozen=True, gc=False):
    """Send the residual of a batch of `num_tokens` tokens to the replica `to`; ends in ActivationsSent or ActivationsFailed."""

    batch: int
    to: ReplicaId
    num_tokens: int


# -- of the router


class Reply(Action, frozen=True, gc=False):
    """Tell the client that `request` is rejected. `retry_after_s` is the router's estimate of when to come back."""

    request: RequestId
    rejection: Rejection
    message: str
    retry_after_s: float


# -- of the controller


class StartReplica(Action, frozen=True, gc=False):
    """Start a process for `replica`; ends in ReplicaStarted or ReplicaLost."""

    replica: ReplicaId


class LoadWeights(Action, frozen=True, gc=False):
    """Bring the weights to `replica`, which is one of `transfer.path`, and build its KV pool.

    Asked again while they are on their way, it takes the place of what was asked before: a source is gone. Layers that have
    arrived stay.
    """

    replica: ReplicaId
    transfer: Transfer


class WarmReplica(Action, frozen=True, gc=False):
    """Run a first step so that the next ones run at full speed; ends in Warmed or ReplicaLost."""

    replica: ReplicaId


class StopReplica(Action, frozen=True, gc=False):
    """End the replica's process; ends in ReplicaStopped."""

    replica: ReplicaId


class Decided(Action, frozen=True, gc=False):
    """Nothing to do, but to be remembered: from now on `after` replicas of the role are wanted, where it were `before`."""

    role: Role
    before: int
    after: int
    why: str


class TellNeighbours(Action, frozen=True, gc=False):
    """Deliver `event` to the controllers of the other fleets on the cluster, at once: before anything else reaches any of them.

    They only take note of it, and answer with nothing; who wants to act on it is woken at the same instant.
    """

    event: AnyEvent


AnyAction = (
    Send | RunSteps | Cut | Preempt | Forget | Reply | StartReplica | LoadWeights | WarmReplica | StopReplica | Decided
    | Hold | Reserve | Join | SendKv | Abandon | RunLayers | SendActivations
    | SwapOut | SwapIn | Evict | TellNeighbours
)  # fmt: skip
"""The closed union, for decoding."""
