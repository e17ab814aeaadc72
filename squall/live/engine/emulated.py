"""An engine that sleeps for as long as a real one is predicted to compute, and says made-up but reproducible text.

Everything around it is real: machines, processes, streams and HTTP cannot tell. It keeps the books of KV blocks as a real
engine must and fails loudly when the machine asks for more than there are. Knows no tensors and no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from squall.core.actions import Chunk, RunLayers, RunSteps
from squall.core.types import MILLISECOND, BlockHash, Nanos, RequestId, RunId
from squall.live.engine.interface import Activations, Job, LayersEnded, RunEnded, TokenOut
from squall.live.engine.sequence import SequenceState
from squall.live.engine.tokenizer import Tokenizer
from squall.perf.latency import UNITS_PER_NANO, LatencyModel
from squall.perf.layer_range import layers

CATCH_UP: Nanos = 5 * MILLISECOND
"""Between two runs of a busy replica our own work passes, which the prediction already holds: so much of it is not slept."""

ATTEMPTS = 64
"""How often another token is drawn until one is printable."""


class Ledger:
    """The KV blocks of one replica, by count; which hash is held and by how many users.

    Raises RuntimeError where there is no block to take: the machine's books and ours differ, which is a bug.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.may_take = -1  # so many of the free ones, before something is evicted instead; -1: all
        self._users: dict[BlockHash, int] = {}

    @property
    def num_held(self) -> int:
        """Blocks that some request uses."""
        return self.num_blocks - self.num_free - sum(not users for users in self._users.values())

    def take(self, count: int, evictable: Iterator[BlockHash]) -> None:
        """`count` blocks become private: free ones, then those of `evictable`, in its order."""
        for _ in range(count):
            if self.num_free and self.may_take:
                self.num_free -= 1
                self.may_take -= self.may_take > 0
                continue
            victim = next(evictable, None)
            if victim is None or self._users.pop(victim, 1):
                raise RuntimeError(f"all {self.num_blocks} KV blocks are in use and another one is asked for (evicting {victim})")

    def use(self, block: BlockHash) -> None:
        if block not in self._users:
            raise RuntimeError(f"block {block} is said to be cached and is not")
        self._users[block] += 1

    def evict(self, blocks: Sequence[BlockHash]) -> None:
        """These held blocks, which nobody uses, become free."""
        for block in blocks:
            if self._users.pop(block, 1):
                raise RuntimeError(f"block {block} is to be evicted, and is in use or not held")
            self.num_free += 1

    def share(self, block: BlockHash) -> bool:
        """A private block gets its name; False where another block has it already."""
        if block in self._users:
            return False
        self._users[block] = 1
        return True

    def release(self, private: int, shared: Sequence[BlockHash]) -> None:
        self.num_free += private
        for block in shared:
            self._users[block] -= 1


class _Sequence:
    """A request's text and its place in the pool."""

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.num_blocks = 0
        self.shared: list[BlockHash] = []
        self.context = 0  # tokens whose KV exists


class EmulatedEngine:
    """See `Engine` and `LiveEngine`: KV and activations that move are counted, and never copied.

    Args:
        latency: prices steps.
        num_blocks, block_size, max_model_len: as in `Engine`.
        tokenizer: whose tokens it says.
        time_dilation: seconds slept for each second predicted.
        num_layers: of the model that is pretended, where it is to run layer by layer.
    """

    def __init__(
        self,
        latency: LatencyModel,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        tokenizer: Tokenizer,
        time_dilation: float = 1.0,
        num_layers: int = 1,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.ledger = Ledger(num_blocks)
        self._latency = latency
        self._tokenizer = tokenizer
        self._time_dilation = time_dilation
        self._sequences: dict[RequestId, _Sequence] = {}
        self._groups: dict[int, dict[RequestId, _Sequence]] = {0: {}}
        self._decoding: dict[RequestId, _Sequence] = {}  # in the run
        self._batches: dict[int, tuple[Chunk, ...]] = {}  # some of whose layers have run
        self._busy_until: Nanos = 0
        self._cut: RunId | None = None

    def load(self) -> None:
        """Nothing to read."""

    def warm(self) -> None:
        """Nothing to prepare."""

    def add(self, job: Job) -> None:
        self._sequences[job.request] = _Sequence(SequenceState(job, self._tokenizer, self.max_model_len))

    def preempt(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            self._release(self._sequences[request])
            self._stop_decoding(request)

    def forget(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            self._stop_decoding(request)
            if (sequence := self._sequences.pop(request, None)) is not None:
                self._release(sequence)
        for batch, chunks in list(self._batches.items()):
            if not any(chunk.request in self._sequences for chunk in chunks):
                self._batches.pop(batch, None)

    def pause(self, request: RequestId) -> int:
        self._stop_decoding(request)
        return self._sequences[request].context

    def blocks(self, _request: RequestId) -> tuple[int, ...]:
        return ()

    def adopt(self, job: Job, num_tokens: int, evictable: Sequence[BlockHash] = ()) -> tuple[int, ...]:
        self.add(job)
        sequence = self._sequences[job.request]
        self.evict(evictable)
        self._grow(sequence, num_tokens, iter(()))
        sequence.context = num_tokens
        return ()

    def resume(self, request: RequestId, group: int = 0) -> None:
        self._groups.setdefault(group, {})[request] = self._sequences[request]

    def evict(self, blocks: Sequence[BlockHash]) -> None:
        self.ledger.evict(blocks)

    def activations(self, batch: int) -> Activations:
        chunks = self._batches.pop(batch)
        return Activations(tuple(c.request for c in chunks), tuple(c.num_tokens for c in chunks), memoryview(b""))

    def reset(self) -> None:
        self._batches.clear()
        self.ledger = Ledger(self.num_blocks)
        self._sequences.clear()
        self._groups = {0: {}}
        self._cut = None

    def cut(self, run: RunId) -> None:
        self._cut = run

    def run(self, action: RunSteps, emit: Callable[[Sequence[TokenOut]], None]) -> RunEnded:
        group = self._choose_group(action)
        self._check(action)
        self.ledger.may_take = action.num_free
        evictable = iter(action.evictable)
        deadline = self._start()
        done = 0
        stopped: tuple[RequestId, ...] = ()
        for price in self._prices(action):
            self._take_blocks(action.chunks, done, evictable)
            tokens = self._finish_step(action.chunks, done, group)  # now, while the engine that we pretend to be computes
            deadline += price
            time.sleep(max(0, deadline - time.monotonic_ns()) / 1e9)
            self._busy_until = deadline
            done += 1
            if tokens:
                emit(tokens)
            stopped = tuple(sorted(out.request for out in tokens if out.finish is not None))
            if stopped or self._cut == action.run:
                break
        self.ledger.may_take = -1
        self.forget(stopped)
        return RunEnded(action.run, done, stopped)

    def run_batch(
        self, action: RunLayers, emit: Callable[[Sequence[TokenOut]], None], _given: Activations | None = None
    ) -> LayersEnded:
        deadline = self._start()
        tokens = []
        for chunk in action.chunks:
            sequence = self._sequences[chunk.request]
            sequence.state.share_nothing()
            self._grow(sequence, chunk.num_tokens, iter(()))
            if action.last_layer == self.num_layers:
                sequence.context = chunk.num_tokens
                tokens.append(self._next_token(sequence.state))
        price = layers(self._latency, action, self.num_layers, action.first_layer, action.last_layer)
        deadline += int(price * self._time_dilation)
        time.sleep(max(0, deadline - time.monotonic_ns()) / 1e9)
        self._busy_until = deadline
        self._batches.pop(action.batch, None)
        if tokens:
            emit(tokens)
        else:
            self._batches[action.batch] = action.chunks
        stopped = tuple(sorted(out.request for out in tokens if out.finish is not None))
        return LayersEnded(action.batch, action.last_layer, stopped)

    # -- time

    def _start(self) -> Nanos:
        """When the first step begins: where the last one ended, unless nothing was left to do since."""
        now = time.monotonic_ns()
        return max(self._busy_until, now - CATCH_UP) if self._batches or any(self._groups.values()) else now

    def _prices(self, action: RunSteps) -> Iterator[Nanos]:
        for part in self._latency.run(action, action.steps):
            for step in range(part.count):
                nanos = max(1, (part.first + step * part.increment) // UNITS_PER_NANO)
                yield int(nanos * self._time_dilation)

    # -- steps

    def _choose_group(self, action: RunSteps) -> dict[RequestId, _Sequence]:
        """The run's group of decodes, after those that change theirs have done so; in a pause none of it decodes."""
        for moved in action.regrouped:
            to = self._groups.setdefault(moved.group, {})
            for request in moved.requests:
                if (sequence := self._stop_decoding(request)) is not None:
                    to[request] = sequence
        group = self._groups.setdefault(action.group, {})
        self._decoding = group if action.num_decodes else {}
        return group

    def _stop_decoding(self, request: RequestId) -> _Sequence | None:
        for group in self._groups.values():
            if (sequence := group.pop(request, None)) is not None:
                return sequence
        return None

    def _check(self, action: RunSteps) -> None:
        """The machine describes the decodes by two sums; both must be ours."""
        context = sum(sequence.context + 1 for sequence in self._decoding.values())
        if (len(self._decoding), context) != (action.num_decodes, action.decode_context):
            raise RuntimeError(
                f"the machine sees {action.num_decodes} decodes over {action.decode_context} tokens, "
                f"the engine {len(self._decoding)} over {context}"
            )

    def _take_blocks(self, chunks: Sequence[Chunk], step: int, evictable: Iterator[BlockHash]) -> None:
        for chunk in chunks:
            if step == 0 and chunk.num_cached:
                self._take_cached(self._sequences[chunk.request], chunk.num_cached)
        for sequence in self._decoding.values():
            self._grow(sequence, sequence.context + 1, evictable)
        for chunk in chunks:
            end = max(chunk.offset + (step + 1) * chunk.num_tokens, chunk.num_reserved * self.block_size)
            self._grow(self._sequences[chunk.request], end, evictable)

    def _take_cached(self, sequence: _Sequence, num_cached: int) -> None:
        blocks = sequence.state.job.block_hashes[: num_cached // self.block_size]
        for block in blocks:
            self.ledger.use(block)
        sequence.num_blocks = len(blocks)
        sequence.shared = list(blocks)
        sequence.context = num_cached
        sequence.state.num_cached_tokens = num_cached

    def _grow(self, sequence: _Sequence, tokens: int, evictable: Iterator[BlockHash]) -> None:
        needed = -(-tokens // self.block_size) - sequence.num_blocks
        self.ledger.take(needed, evictable)
        sequence.num_blocks += max(0, needed)

    def _finish_step(self, chunks: Sequence[Chunk], step: int, group: dict[RequestId, _Sequence]) -> list[TokenOut]:
        tokens = []
        for sequence in self._decoding.values():
            sequence.context += 1
            tokens.append(self._next_token(sequence.state))
        for chunk in chunks:
            sequence = self._sequences[chunk.request]
            sequence.context = chunk.offset + (step + 1) * chunk.num_tokens
            self._share_prompt(sequence, sequence.context - chunk.num_tokens)
            if chunk.last:
                group[chunk.request] = sequence
                tokens.append(self._next_token(sequence.state))
        return tokens

    def _share_prompt(self, sequence: _Sequence, before: int) -> None:
        """The prompt's blocks that became full since `before` tokens get their names."""
        for block in sequence.state.job.block_hashes[before // self.block_size : sequence.context // self.block_size]:
            if self.ledger.share(block):
                sequence.shared.append(block)

    def _release(self, sequence: _Sequence) -> None:
        self.ledger.release(sequence.num_blocks - len(sequence.shared), sequence.shared)
        sequence.num_blocks = sequence.context = 0
        sequence.shared = []

    # -- text

    def _next_token(self, state: SequenceState) -> TokenOut:
        token = pseudo_token(self._tokenizer, state.job.sampling.seed, state.num_output_tokens)
        if state.job.sampling.logprobs is None:
            return state.accept(token)
        return state.accept(
            token, 0.0, [(token, 0.0)] if state.job.sampling.logprobs else []
        )  # certain: nothing else was possible


def pseudo_token(tokenizer: Tokenizer, seed: int, position: int) -> int:
    """The token that a request with `seed` says at `position` of its output: printable, and never one that ends it."""
    token = 0
    for attempt in range(ATTEMPTS):
        digest = blake2b(b"%d %d %d" % (seed, position, attempt), digest_size=8).digest()
        token = int.from_bytes(digest, "little") % tokenizer.vocab_size
        if (
            not tokenizer.is_special(token)
            and token not in tokenizer.eos_token_ids
            and _is_printable(tokenizer.token_bytes(token))
        ):
            break
    return token


def _is_printable(piece: bytes) -> bool:
    return piece.isascii() and piece.decode().isprintable() and bool(piece)
