from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]

class Rejection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_UNSPECIFIED: _ClassVar[Rejection]
    REJECTION_TOO_LARGE: _ClassVar[Rejection]
    REJECTION_QUEUE_FULL: _ClassVar[Rejection]
    REJECTION_DRAINING: _ClassVar[Rejection]
    REJECTION_NO_CAPACITY: _ClassVar[Rejection]
    REJECTION_LOST: _ClassVar[Rejection]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
REJECTION_UNSPECIFIED: Rejection
REJECTION_TOO_LARGE: Rejection
REJECTION_QUEUE_FULL: Rejection
REJECTION_DRAINING: Rejection
REJECTION_NO_CAPACITY: Rejection
REJECTION_LOST: Rejection

class ToReplica(_message.Message):
    __slots__ = ("open", "event", "action", "kv_offer", "activations_offer", "job", "peers", "jobs")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    KV_OFFER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_OFFER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    open: Open
    event: Event
    action: Action
    kv_offer: KvOffer
    activations_offer: ActivationsOffer
    job: Job
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., action: _Optional[_Union[Action, _Mapping]] = ..., kv_offer: _Optional[_Union[KvOffer, _Mapping]] = ..., activations_offer: _Optional[_Union[ActivationsOffer, _Mapping]] = ..., job: _Optional[_Union[Job, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("replica", "settled")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    replica: int
    settled: bool
    def __init__(self, replica: _Optional[int] = ..., settled: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("replica", "addresses")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class FromReplica(_message.Message):
    __slots__ = ("send", "output", "load", "begun", "peer", "moved", "kv_offer", "activations_offer", "jobs")
    SEND_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    KV_OFFER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_OFFER_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    send: Send
    output: StepOutput
    load: ReplicaLoad
    begun: Begun
    peer: Peer
    moved: WeightsMoved
    kv_offer: KvOffer
    activations_offer: ActivationsOffer
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, send: _Optional[_Union[Send, _Mapping]] = ..., output: _Optional[_Union[StepOutput, _Mapping]] = ..., load: _Optional[_Union[ReplicaLoad, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., moved: _Optional[_Union[WeightsMoved, _Mapping]] = ..., kv_offer: _Optional[_Union[KvOffer, _Mapping]] = ..., activations_offer: _Optional[_Union[ActivationsOffer, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class ActivationsOffer(_message.Message):
    __slots__ = ("batch", "requests", "num_tokens", "num_bytes", "sum", "addresses", "source", "to", "number")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    batch: int
    requests: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: int
    sum: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    source: int
    to: int
    number: int
    def __init__(self, batch: _Optional[int] = ..., requests: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[int] = ..., sum: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., source: _Optional[int] = ..., to: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class KvOffer(_message.Message):
    __slots__ = ("request", "first", "last", "num_tokens", "blocks", "sums", "pool", "addresses", "source", "to", "number")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request: int
    first: int
    last: int
    num_tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    pool: Pool
    addresses: _containers.RepeatedScalarFieldContainer[str]
    source: int
    to: int
    number: int
    def __init__(self, request: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[int]] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., source: _Optional[int] = ..., to: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("num_layers", "num_blocks", "block_bytes", "num_ranks")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_blocks: int
    block_bytes: int
    num_ranks: int
    def __init__(self, num_layers: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class WeightsMoved(_message.Message):
    __slots__ = ("kind", "num_bytes", "first_byte_s", "seconds", "num_repaired")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_bytes: int
    first_byte_s: float
    seconds: float
    num_repaired: int
    def __init__(self, kind: _Optional[str] = ..., num_bytes: _Optional[int] = ..., first_byte_s: _Optional[float] = ..., seconds: _Optional[float] = ..., num_repaired: _Optional[int] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenOut]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenOut, _Mapping]]] = ...) -> None: ...

class TokenOut(_message.Message):
    __slots__ = ("request", "token", "text", "finish", "stop_string", "stop_token", "num_cached_tokens", "logprob", "top")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    request: int
    token: int
    text: str
    finish: str
    stop_string: str
    stop_token: int
    num_cached_tokens: int
    logprob: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, request: _Optional[int] = ..., token: _Optional[int] = ..., text: _Optional[str] = ..., finish: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., logprob: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "text", "bytes", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    text: str
    bytes: bytes
    logprob: float
    def __init__(self, token: _Optional[int] = ..., text: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_prefix_cache_queries", "num_prefix_cache_hits")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("request", "prompt", "sampling", "output", "block_hashes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    output: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., output: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    skip_special_tokens: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., skip_special_tokens: bool = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "arrived_at", "num_prompt_tokens", "max_output_tokens", "num_output_tokens", "block_hashes", "session")
    ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    id: int
    arrived_at: int
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    session: int
    def __init__(self, id: _Optional[int] = ..., arrived_at: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., session: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("submitted", "steps_done", "cancelled", "arrived", "progressed", "replica_up", "replica_down", "drain_wanted", "replica_started", "layer_arrived", "weights_loaded", "load_failed", "warmed", "emptied", "replica_lost", "replica_stopped", "woke", "stirred", "scale_wanted", "node_down", "node_up", "kv_sent", "kv_failed", "kv_arrived", "live_paired", "unpaired", "layers_done", "pull_wanted", "handed_over", "nothing_left", "batch_formed", "activations_sent", "activations_failed", "activations_arrived", "taken_over", "surrendered", "disowned", "offered", "kv_wanted", "dropped", "role_changed", "adopted", "not_held", "handoff_failed", "kept", "move_wanted", "return_wanted", "keep_wanted", "notice_given", "gpus_held")
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_UP_FIELD_NUMBER: _ClassVar[int]
    REPLICA_DOWN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WANTED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_STARTED_FIELD_NUMBER: _ClassVar[int]
    LAYER_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LOADED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILED_FIELD_NUMBER: _ClassVar[int]
    WARMED_FIELD_NUMBER: _ClassVar[int]
    EMPTIED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_LOST_FIELD_NUMBER: _ClassVar[int]
    REPLICA_STOPPED_FIELD_NUMBER: _ClassVar[int]
    WOKE_FIELD_NUMBER: _ClassVar[int]
    STIRRED_FIELD_NUMBER: _ClassVar[int]
    SCALE_WANTED_FIELD_NUMBER: _ClassVar[int]
    NODE_DOWN_FIELD_NUMBER: _ClassVar[int]
    NODE_UP_FIELD_NUMBER: _ClassVar[int]
    KV_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    LIVE_PAIRED_FIELD_NUMBER: _ClassVar[int]
    UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    PULL_WANTED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    NOTHING_LEFT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FORMED_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_SENT_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FAILED_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    SURRENDERED_FIELD_NUMBER: _ClassVar[int]
    DISOWNED_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    KV_WANTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ROLE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    NOT_HELD_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    MOVE_WANTED_FIELD_NUMBER: _ClassVar[int]
    RETURN_WANTED_FIELD_NUMBER: _ClassVar[int]
    KEEP_WANTED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_GIVEN_FIELD_NUMBER: _ClassVar[int]
    GPUS_HELD_FIELD_NUMBER: _ClassVar[int]
    submitted: Submitted
    steps_done: StepsDone
    cancelled: Cancelled
    arrived: Arrived
    progressed: Progressed
    replica_up: ReplicaUp
    replica_down: ReplicaDown
    drain_wanted: DrainWanted
    replica_started: ReplicaStarted
    layer_arrived: LayerArrived
    weights_loaded: WeightsLoaded
    load_failed: LoadFailed
    warmed: Warmed
    emptied: Emptied
    replica_lost: ReplicaLost
    replica_stopped: ReplicaStopped
    woke: Woke
    stirred: Stirred
    scale_wanted: ScaleWanted
    node_down: NodeDown
    node_up: NodeUp
    kv_sent: KvSent
    kv_failed: KvFailed
    kv_arrived: KvArrived
    live_paired: LivePaired
    unpaired: Unpaired
    layers_done: LayersDone
    pull_wanted: PullWanted
    handed_over: HandedOver
    nothing_left: NothingLeft
    batch_formed: BatchFormed
    activations_sent: ActivationsSent
    activations_failed: ActivationsFailed
    activations_arrived: ActivationsArrived
    taken_over: TakenOver
    surrendered: Surrendered
    disowned: Disowned
    offered: Offered
    kv_wanted: KvWanted
    dropped: Dropped
    role_changed: RoleChanged
    adopted: Adopted
    not_held: NotHeld
    handoff_failed: HandoffFailed
    kept: Kept
    move_wanted: MoveWanted
    return_wanted: ReturnWanted
    keep_wanted: KeepWanted
    notice_given: NoticeGiven
    gpus_held: GpusHeld
    def __init__(self, submitted: _Optional[_Union[Submitted, _Mapping]] = ..., steps_done: _Optional[_Union[StepsDone, _Mapping]] = ..., cancelled: _Optional[_Union[Cancelled, _Mapping]] = ..., arrived: _Optional[_Union[Arrived, _Mapping]] = ..., progressed: _Optional[_Union[Progressed, _Mapping]] = ..., replica_up: _Optional[_Union[ReplicaUp, _Mapping]] = ..., replica_down: _Optional[_Union[ReplicaDown, _Mapping]] = ..., drain_wanted: _Optional[_Union[DrainWanted, _Mapping]] = ..., replica_started: _Optional[_Union[ReplicaStarted, _Mapping]] = ..., layer_arrived: _Optional[_Union[LayerArrived, _Mapping]] = ..., weights_loaded: _Optional[_Union[WeightsLoaded, _Mapping]] = ..., load_failed: _Optional[_Union[LoadFailed, _Mapping]] = ..., warmed: _Optional[_Union[Warmed, _Mapping]] = ..., emptied: _Optional[_Union[Emptied, _Mapping]] = ..., replica_lost: _Optional[_Union[ReplicaLost, _Mapping]] = ..., replica_stopped: _Optional[_Union[ReplicaStopped, _Mapping]] = ..., woke: _Optional[_Union[Woke, _Mapping]] = ..., stirred: _Optional[_Union[Stirred, _Mapping]] = ..., scale_wanted: _Optional[_Union[ScaleWanted, _Mapping]] = ..., node_down: _Optional[_Union[NodeDown, _Mapping]] = ..., node_up: _Optional[_Union[NodeUp, _Mapping]] = ..., kv_sent: _Optional[_Union[KvSent, _Mapping]] = ..., kv_failed: _Optional[_Union[KvFailed, _Mapping]] = ..., kv_arrived: _Optional[_Union[KvArrived, _Mapping]] = ..., live_paired: _Optional[_Union[LivePaired, _Mapping]] = ..., unpaired: _Optional[_Union[Unpaired, _Mapping]] = ..., layers_done: _Optional[_Union[LayersDone, _Mapping]] = ..., pull_wanted: _Optional[_Union[PullWanted, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., nothing_left: _Optional[_Union[NothingLeft, _Mapping]] = ..., batch_formed: _Optional[_Union[BatchFormed, _Mapping]] = ..., activations_sent: _Optional[_Union[ActivationsSent, _Mapping]] = ..., activations_failed: _Optional[_Union[ActivationsFailed, _Mapping]] = ..., activations_arrived: _Optional[_Union[ActivationsArrived, _Mapping]] = ..., taken_over: _Optional[_Union[TakenOver, _Mapping]] = ..., surrendered: _Optional[_Union[Surrendered, _Mapping]] = ..., disowned: _Optional[_Union[Disowned, _Mapping]] = ..., offered: _Optional[_Union[Offered, _Mapping]] = ..., kv_wanted: _Optional[_Union[KvWanted, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ..., role_changed: _Optional[_Union[RoleChanged, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., not_held: _Optional[_Union[NotHeld, _Mapping]] = ..., handoff_failed: _Optional[_Union[HandoffFailed, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., move_wanted: _Optional[_Union[MoveWanted, _Mapping]] = ..., return_wanted: _Optional[_Union[ReturnWanted, _Mapping]] = ..., keep_wanted: _Optional[_Union[KeepWanted, _Mapping]] = ..., notice_given: _Optional[_Union[NoticeGiven, _Mapping]] = ..., gpus_held: _Optional[_Union[GpusHeld, _Mapping]] = ...) -> None: ...

class Submitted(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: Request
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class StepsDone(_message.Message):
    __slots__ = ("run", "steps", "stopped")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    run: int
    steps: int
    stopped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[int] = ..., steps: _Optional[int] = ..., stopped: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: Request
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Progressed(_message.Message):
    __slots__ = ("replica", "first", "finished", "preempted", "held")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    replica: int
    first: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[int]
    preempted: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, replica: _Optional[int] = ..., first: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[int]] = ..., preempted: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request", "num_tokens", "head", "num_layers")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    request: int
    num_tokens: int
    head: int
    num_layers: int
    def __init__(self, request: _Optional[int] = ..., num_tokens: _Optional[int] = ..., head: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class ReplicaUp(_message.Message):
    __slots__ = ("replica", "num_blocks", "block_size", "role", "partner")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    replica: int
    num_blocks: int
    block_size: int
    role: Role
    partner: int
    def __init__(self, replica: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., partner: _Optional[int] = ...) -> None: ...

class ReplicaDown(_message.Message):
    __slots__ = ("replica", "lost", "asked")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    replica: int
    lost: bool
    asked: bool
    def __init__(self, replica: _Optional[int] = ..., lost: bool = ..., asked: bool = ...) -> None: ...

class DrainWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaStarted(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class LayerArrived(_message.Message):
    __slots__ = ("replica", "layer")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    replica: int
    layer: int
    def __init__(self, replica: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...

class WeightsLoaded(_message.Message):
    __slots__ = ("replica", "num_blocks", "block_size")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    num_blocks: int
    block_size: int
    def __init__(self, replica: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class LoadFailed(_message.Message):
    __slots__ = ("replica", "reason")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replica: int
    reason: str
    def __init__(self, replica: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Warmed(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class Emptied(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class ReplicaLost(_message.Message):
    __slots__ = ("replica", "reason", "steps")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    reason: str
    steps: int
    def __init__(self, replica: _Optional[int] = ..., reason: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class ReplicaStopped(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class Woke(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stirred(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleWanted(_message.Message):
    __slots__ = ("role", "count")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    role: Role
    count: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., count: _Optional[int] = ...) -> None: ...

class NodeDown(_message.Message):
    __slots__ = ("node", "at")
    NODE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    node: int
    at: int
    def __init__(self, node: _Optional[int] = ..., at: _Optional[int] = ...) -> None: ...

class NodeUp(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: int
    def __init__(self, node: _Optional[int] = ...) -> None: ...

class GpusHeld(_message.Message):
    __slots__ = ("fleet", "gpus", "copies", "copy_bytes")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_FIELD_NUMBER: _ClassVar[int]
    fleet: int
    gpus: _containers.RepeatedScalarFieldContainer[int]
    copies: _containers.RepeatedScalarFieldContainer[int]
    copy_bytes: int
    def __init__(self, fleet: _Optional[int] = ..., gpus: _Optional[_Iterable[int]] = ..., copies: _Optional[_Iterable[int]] = ..., copy_bytes: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("source", "first_layer", "last_layer")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    source: int
    first_layer: int
    last_layer: int
    def __init__(self, source: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ...) -> None: ...

class Offered(_message.Message):
    __slots__ = ("request", "num_tokens", "parts")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    num_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., num_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class KvWanted(_message.Message):
    __slots__ = ("request", "to", "first_layer", "last_layer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    request: int
    to: int
    first_layer: int
    last_layer: int
    def __init__(self, request: _Optional[int] = ..., to: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ...) -> None: ...

class KvSent(_message.Message):
    __slots__ = ("request", "to", "num_bytes", "took", "path")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    request: int
    to: int
    num_bytes: int
    took: int
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[int] = ..., to: _Optional[int] = ..., num_bytes: _Optional[int] = ..., took: _Optional[int] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class KvFailed(_message.Message):
    __slots__ = ("request", "to", "first_layer", "last_layer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    request: int
    to: int
    first_layer: int
    last_layer: int
    def __init__(self, request: _Optional[int] = ..., to: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ...) -> None: ...

class KvArrived(_message.Message):
    __slots__ = ("request", "first_layer", "last_layer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    request: int
    first_layer: int
    last_layer: int
    def __init__(self, request: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("request", "by")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    request: int
    by: int
    def __init__(self, request: _Optional[int] = ..., by: _Optional[int] = ...) -> None: ...

class RoleChanged(_message.Message):
    __slots__ = ("replica", "role")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    role: Role
    def __init__(self, replica: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("replica", "request")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    replica: int
    request: int
    def __init__(self, replica: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class NotHeld(_message.Message):
    __slots__ = ("replica", "request")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    replica: int
    request: int
    def __init__(self, replica: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class HandoffFailed(_message.Message):
    __slots__ = ("replica", "request", "to")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    replica: int
    request: int
    to: int
    def __init__(self, replica: _Optional[int] = ..., request: _Optional[int] = ..., to: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("replica", "requests")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replica: _Optional[int] = ..., requests: _Optional[_Iterable[int]] = ...) -> None: ...

class NoticeGiven(_message.Message):
    __slots__ = ("replica", "notice")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    notice: int
    def __init__(self, replica: _Optional[int] = ..., notice: _Optional[int] = ...) -> None: ...

class MoveWanted(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class ReturnWanted(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class KeepWanted(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class LivePaired(_message.Message):
    __slots__ = ("target", "source", "num_layers")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    target: int
    source: int
    num_layers: int
    def __init__(self, target: _Optional[int] = ..., source: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class Unpaired(_message.Message):
    __slots__ = ("target", "source", "lost")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    target: int
    source: int
    lost: bool
    def __init__(self, target: _Optional[int] = ..., source: _Optional[int] = ..., lost: bool = ...) -> None: ...

class LayersDone(_message.Message):
    __slots__ = ("batch", "last_layer", "stopped")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    batch: int
    last_layer: int
    stopped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch: _Optional[int] = ..., last_layer: _Optional[int] = ..., stopped: _Optional[_Iterable[int]] = ...) -> None: ...

class PullWanted(_message.Message):
    __slots__ = ("source", "num_blocks")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    source: int
    num_blocks: int
    def __init__(self, source: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("target", "batch", "layer", "requests")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    target: int
    batch: int
    layer: int
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    def __init__(self, target: _Optional[int] = ..., batch: _Optional[int] = ..., layer: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ...) -> None: ...

class NothingLeft(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class BatchFormed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActivationsSent(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class ActivationsFailed(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class ActivationsArrived(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class TakenOver(_message.Message):
    __slots__ = ("replica", "target", "requests")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    target: int
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replica: _Optional[int] = ..., target: _Optional[int] = ..., requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Surrendered(_message.Message):
    __slots__ = ("replica", "requests")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replica: _Optional[int] = ..., requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Disowned(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("send", "run_steps", "cut", "preempt", "forget", "reply", "start_replica", "load_weights", "warm_replica", "stop_replica", "decided", "send_kv", "abandon", "run_layers", "send_activations", "swap_out", "swap_in", "evict", "hold", "reserve", "join", "tell_neighbours")
    SEND_FIELD_NUMBER: _ClassVar[int]
    RUN_STEPS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    START_REPLICA_FIELD_NUMBER: _ClassVar[int]
    LOAD_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WARM_REPLICA_FIELD_NUMBER: _ClassVar[int]
    STOP_REPLICA_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    SEND_KV_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    RUN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SEND_ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    TELL_NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    send: Send
    run_steps: RunSteps
    cut: Cut
    preempt: Preempt
    forget: Forget
    reply: Reply
    start_replica: StartReplica
    load_weights: LoadWeights
    warm_replica: WarmReplica
    stop_replica: StopReplica
    decided: Decided
    send_kv: SendKv
    abandon: Abandon
    run_layers: RunLayers
    send_activations: SendActivations
    swap_out: SwapOut
    swap_in: SwapIn
    evict: Evict
    hold: Hold
    reserve: Reserve
    join: Join
    tell_neighbours: TellNeighbours
    def __init__(self, send: _Optional[_Union[Send, _Mapping]] = ..., run_steps: _Optional[_Union[RunSteps, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., preempt: _Optional[_Union[Preempt, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., start_replica: _Optional[_Union[StartReplica, _Mapping]] = ..., load_weights: _Optional[_Union[LoadWeights, _Mapping]] = ..., warm_replica: _Optional[_Union[WarmReplica, _Mapping]] = ..., stop_replica: _Optional[_Union[StopReplica, _Mapping]] = ..., decided: _Optional[_Union[Decided, _Mapping]] = ..., send_kv: _Optional[_Union[SendKv, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., run_layers: _Optional[_Union[RunLayers, _Mapping]] = ..., send_activations: _Optional[_Union[SendActivations, _Mapping]] = ..., swap_out: _Optional[_Union[SwapOut, _Mapping]] = ..., swap_in: _Optional[_Union[SwapIn, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., tell_neighbours: _Optional[_Union[TellNeighbours, _Mapping]] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("to", "event")
    TO_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    to: int
    event: Event
    def __init__(self, to: _Optional[int] = ..., event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("request", "offset", "num_tokens", "num_cached", "last", "num_reserved")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    request: int
    offset: int
    num_tokens: int
    num_cached: int
    last: bool
    num_reserved: int
    def __init__(self, request: _Optional[int] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_cached: _Optional[int] = ..., last: bool = ..., num_reserved: _Optional[int] = ...) -> None: ...

class Regrouped(_message.Message):
    __slots__ = ("group", "requests")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    group: int
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., requests: _Optional[_Iterable[int]] = ...) -> None: ...

class RunSteps(_message.Message):
    __slots__ = ("run", "steps", "num_decodes", "decode_context", "chunks", "evictable", "group", "regrouped", "num_copied", "num_free")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REGROUPED_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    run: int
    steps: int
    num_decodes: int
    decode_context: int
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    evictable: _containers.RepeatedScalarFieldContainer[int]
    group: int
    regrouped: _containers.RepeatedCompositeFieldContainer[Regrouped]
    num_copied: int
    num_free: int
    def __init__(self, run: _Optional[int] = ..., steps: _Optional[int] = ..., num_decodes: _Optional[int] = ..., decode_context: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., evictable: _Optional[_Iterable[int]] = ..., group: _Optional[int] = ..., regrouped: _Optional[_Iterable[_Union[Regrouped, _Mapping]]] = ..., num_copied: _Optional[int] = ..., num_free: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: int
    def __init__(self, run: _Optional[int] = ...) -> None: ...

class Preempt(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapOut(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapIn(_message.Message):
    __slots__ = ("request", "num_blocks", "evictable")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    request: int
    num_blocks: int
    evictable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., num_blocks: _Optional[int] = ..., evictable: _Optional[_Iterable[int]] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request", "num_tokens", "evictable")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    request: int
    num_tokens: int
    evictable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., num_tokens: _Optional[int] = ..., evictable: _Optional[_Iterable[int]] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("requests", "group")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    group: int
    def __init__(self, requests: _Optional[_Iterable[int]] = ..., group: _Optional[int] = ...) -> None: ...

class SendKv(_message.Message):
    __slots__ = ("request", "to", "first_layer", "last_layer", "num_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    to: int
    first_layer: int
    last_layer: int
    num_tokens: int
    def __init__(self, request: _Optional[int] = ..., to: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class RunLayers(_message.Message):
    __slots__ = ("batch", "first_layer", "last_layer", "chunks")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    first_layer: int
    last_layer: int
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, batch: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class SendActivations(_message.Message):
    __slots__ = ("batch", "to", "num_tokens")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    to: int
    num_tokens: int
    def __init__(self, batch: _Optional[int] = ..., to: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("request", "rejection", "message", "retry_after_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request: int
    rejection: Rejection
    message: str
    retry_after_s: float
    def __init__(self, request: _Optional[int] = ..., rejection: _Optional[_Union[Rejection, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class StartReplica(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class LoadWeights(_message.Message):
    __slots__ = ("replica", "transfer")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    replica: int
    transfer: Transfer
    def __init__(self, replica: _Optional[int] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("kind", "id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: int
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("model", "source", "path", "kind", "live_partner", "more_sources", "seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LIVE_PARTNER_FIELD_NUMBER: _ClassVar[int]
    MORE_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    source: Place
    path: _containers.RepeatedScalarFieldContainer[int]
    kind: str
    live_partner: int
    more_sources: _containers.RepeatedCompositeFieldContainer[Place]
    seconds: float
    def __init__(self, model: _Optional[str] = ..., source: _Optional[_Union[Place, _Mapping]] = ..., path: _Optional[_Iterable[int]] = ..., kind: _Optional[str] = ..., live_partner: _Optional[int] = ..., more_sources: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class WarmReplica(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class StopReplica(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class Decided(_message.Message):
    __slots__ = ("role", "before", "after", "why")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    role: Role
    before: int
    after: int
    why: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class TellNeighbours(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...
