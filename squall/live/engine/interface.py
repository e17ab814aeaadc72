"""What a worker asks of an engine, and what it gets back. Knows no machine, no network and no tensors.

An engine lives in one thread of its own. It keeps, for every request it was given, the tokens and how to sample, and owns the
physical KV blocks; which requests run in a step, and how many blocks there are, the replica's machine decides.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from squall.core.actions import Chunk, RunLayers, RunSteps
from squall.core.types import BlockHash, RequestId, RunId


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen. Noise is keyed by (seed, position): tokens do not depend on the batch."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # how many alternatives a token; 0 is the chosen one alone
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True


class Job(Struct, frozen=True):
    """A request's data: what travels beside `core.types.Request` and machines never see.

    `output` holds the tokens already delivered to the client, when the request is continued after its replica died.
    `block_hashes` are those of the `Request` that the machine was given (none where it shares no prefixes): the engine
    files the prompt's full blocks under them (see `RunSteps`). `squall.live.engine.hashing` makes them.
    """

    request: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    output: tuple[int, ...] = ()
    block_hashes: tuple[BlockHash, ...] = ()


class TokenLogprob(Struct, frozen=True):
    """One token with its text, its bytes and its natural-log probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


class TokenOut(Struct, frozen=True):
    """What one step yields for one request.

    Attributes:
        text: text that became certain with this token: it cannot be the start of a stop string nor of an incomplete
            character any more. May be empty; the last one carries whatever is left.
        finish: "stop" or "length" with the last token, None before.
        stop_reason: the stop string or token id that matched, where one did.
        logprob, top: where asked for.
    """

    request: RequestId
    token: int
    text: str
    finish: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


class RunEnded(Struct, frozen=True):
    """How a run ended; becomes the event StepsDone."""

    run: RunId
    steps: int
    stopped: tuple[RequestId, ...]


class LayersEnded(Struct, frozen=True):
    """How some layers of a batch ended; becomes the event LayersDone. Who `stopped` keeps its blocks until it is forgotten."""

    batch: int
    last_layer: int
    stopped: tuple[RequestId, ...]


class Activations(Struct, frozen=True):
    """What lies between two layers of a batch: the residual of its tokens, request by request.

    Attributes:
        requests: whose.
        num_tokens: of each.
        data: bytes, in the engine's number type; none where it pretends.
    """

    requests: tuple[RequestId, ...]
    num_tokens: tuple[int, ...]
    data: memoryview


class Engine(Protocol):
    """All methods are called in the engine's own thread, except `cut` (and `blocks`).

    Attributes:
        num_blocks, block_size: the KV pool, known after `load`.
        max_model_len: the longest prompt plus output.
    """

    num_blocks: int
    block_size: int
    max_model_len: int

    def load(self) -> None:
        """Read the weights and build the KV pool. Raises ModelError."""
        ...

    def warm(self) -> None:
        """Run a first step."""
        ...

    def add(self, job: Job) -> None:
        """Take a request's data; it runs when a chunk of it comes."""
        ...

    def preempt(self, requests: Sequence[RequestId]) -> None:
        """Free their KV, keep their tokens."""
        ...

    def forget(self, requests: Sequence[RequestId]) -> None:
        """Free their KV and drop them. Unknown ids are ignored."""
        ...

    def reset(self) -> None:
        """Forget all requests and the prefix cache: a new machine begins, to which every block is free. Keeps the weights."""
        ...

    def run(self, action: RunSteps, emit: Callable[[Sequence[TokenOut]], None]) -> RunEnded:
        """Run until the steps are done, a sequence stops or `cut` was called for this run; `emit` gets all tokens of a step."""
        ...

    def cut(self, run: RunId) -> None:
        """Ask run `run` to end at its next step boundary. From any thread; harmless when it has ended."""
        ...


class KvEngine(Engine, Protocol):
    """An engine whose sequences can stand still, and go on where others have begun them."""

    def pause(self, request: RequestId) -> int:
        """Decode it no more, keep its tokens and KV. Returns how many tokens have KV: all but the last, once it decodes."""
        ...

    def blocks(self, request: RequestId) -> tuple[int, ...]:
        """Where the KV of a sequence lies that stands still; none where there is nothing to be read. From any thread."""
        ...

    def adopt(self, job: Job, num_tokens: int, evictable: Sequence[BlockHash] = ()) -> tuple[int, ...]:
        """Take a sequence over that another engine began: blocks for the KV of `num_tokens` tokens, which comes later.

        All of `evictable` is evicted first.
        """
        ...

    def resume(self, request: RequestId, group: int = 0) -> None:
        """All its KV is here: decode with `group` from the next run on."""
        ...


class LiveEngine(KvEngine, Protocol):
    """An engine that runs some layers of a batch of whole prompts, keeps what lies between two of them, and gives and takes it.

    Whoever gets its first token from layers does not decode before `resume`. A batch shares nothing with the prefix cache.

    Attributes:
        num_layers: of the model; known before `load`.
    """

    @property
    def num_layers(self) -> int: ...

    def evict(self, blocks: Sequence[BlockHash]) -> None:
        """These cached blocks, which nobody uses, are free from now on."""
        ...

    def run_batch(
        self, action: RunLayers, emit: Callable[[Sequence[TokenOut]], None], given: Activations | None = None, /
    ) -> LayersEnded:
        """Run these layers on what is kept of the batch, or on what another engine has `given`; of it, requests that are not
        in `action` any more are left out. After the model's last layer nothing is kept.

        Raises TransferFailed for layers that have not arrived, ValueError for what was given and is not of this batch.
        """
        ...

    def activations(self, batch: int) -> Activations:
        """What is kept of a batch, for good: it goes on elsewhere. From any thread. Raises KeyError where nothing is kept."""
        ...


Hidden = Any
"""The residual stream of a step between two layers, in the engine's own type."""

Split = Any
"""A step that is run layer range by layer range, in the engine's own type."""


class LayerEngine(KvEngine, Protocol):
    """An engine whose layers can be run where they are: the first here, the others by another engine, and whose KV can move.

    A prompt that two engines share is `add`ed to both. The first prepares a split and runs its layers on it; the second
    prepares the same chunks, takes the hidden state over as bytes, runs the rest and draws the token. Each then holds the KV
    of its layers; where both halves have come together, `resume` lets the sequence decode.

    Attributes:
        num_layers: of the model.
        layers_ready: leading layers whose weights have arrived and match their checksums.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def layers_ready(self) -> int: ...

    def build(self) -> None:
        """As `load`, without the weights: they arrive in the engine's arena from wherever they come."""
        ...

    def prepare(self, chunks: Sequence[Chunk], evictable: Sequence[BlockHash] = ()) -> Split:
        """Take the KV blocks of a step that has these chunks and no decodes."""
        ...

    def run_layers(self, split: Split, first: int, last: int, hidden: Hidden = None) -> Hidden:
        """The hidden state after layers [first, last). With `first` 0, the embedding comes before, and `hidden` is None.

        Raises TransferFailed for layers that have not arrived. Running a layer again does no harm.
        """
        ...

    def finish(self, split: Split, hidden: Hidden) -> list[TokenOut]:
        """After the last layer: a token for each chunk that was its prompt's last. The sequences do not decode yet."""
        ...

    def hidden_to_bytes(self, hidden: Hidden) -> memoryview: ...

    def hidden_from_bytes(self, split: Split, data: memoryview) -> Hidden:
        """Raises ValueError where it is not a hidden state of this step."""
        ...
