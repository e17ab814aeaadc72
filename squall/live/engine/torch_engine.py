"""The built-in engine: runs what the replica's machine plans, with real weights.

Knows sequences, blocks and batches, and puts the parts together; the mathematics is in decoder.py, the choice of tokens in
sampling.py. Decides nothing: how many blocks, who runs and who is evicted come with every action.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squall.core.actions import Chunk, RunLayers, RunSteps
from squall.core.types import BlockHash, RequestId, RunId
from squall.errors import ConfigError
from squall.live.engine import devices
from squall.live.engine.architecture import DecoderConfig, read_decoder_config
from squall.live.engine.attention import Batch, KvCache, Span
from squall.live.engine.decoder import Decoder, native_fits
from squall.live.engine.interface import Activations, Job, LayersEnded, RunEnded, TokenOut
from squall.live.engine.kernels import Kernels, load_kernels
from squall.live.engine.kv import BlockTables
from squall.live.engine.layers import Batches
from squall.live.engine.loader import load_from_disk
from squall.live.engine.parallel import Leading, Shape, assemble
from squall.live.engine.rows import DecodeRows
from squall.live.engine.sampling import draw, noise_table
from squall.live.engine.sequence import SequenceState
from squall.live.engine.team import Team
from squall.live.engine.tokenizer import Tokenizer
from squall.live.engine.weights import DTYPES, Shard, Weights, allocate, kv_heads_share
from squall.live.transport.kv import KV, Pool
from squall.live.transport.region import Region


class Step:
    """A step that is prepared: its batch, which rows of its result yield a token, and for whom."""

    def __init__(self, chunks: Sequence[Chunk], batch: Batch, decoding: list[RequestId], rows: Tensor) -> None:
        self.batch = batch
        self.chunks = chunks
        self.decoding = decoding
        self.rows = rows

    @property
    def last(self) -> list[Chunk]:
        """The chunks that complete a prefill."""
        return [chunk for chunk in self.chunks if chunk.last]


class TorchEngine:
    """See `Engine`, `LayerEngine` and `LiveEngine`.

    Args:
        folder: a checkpoint in Hugging Face layout; kept as `folder`.
        tokenizer: of this checkpoint.
        num_blocks, block_size: the KV pool.
        max_model_len: the longest prompt plus output; the model's own limit when None.
        device: "cpu" or "cuda".
        dtype: "fp32", "bf16", "fp16" or "auto": fp32 on a CPU, the checkpoint's own on a GPU.
        threads: of compute, on the CPU.
        native: use native kernels where they can be had.
        team: the other ranks of a tensor-parallel replica, started; None where this process is all of it.

    Attributes:
        weights: once it is built; `weights.arena` is what they arrive in.
        shards: those of all ranks, ours first: the others' arrive here, too, in memory that they see.
        cache: our KV pool; kv_pool: the layout of all ranks', kv_region: their memory, for peers (None on several GPUs that
            cannot lend memory to each other's processes: KV does not leave these).
    """

    weights: Weights
    shards: list[Weights]
    cache: KvCache
    kv_pool: Pool
    kv_region: Region | None

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int = 1,
        native: bool = True,
        team: Team | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len or 0
        self.folder = folder
        self._tokenizer = tokenizer
        self._device_name = device
        self._dtype_name = dtype
        self._threads = threads
        self._native = native
        self.team = team
        self._states: dict[RequestId, SequenceState] = {}
        self._cut: RunId | None = None
        self._blocks: BlockTables
        self._batches: Batches
        self._groups: dict[int, DecodeRows]
        self._group: DecodeRows  # of the run: whom its prefills join
        self._rows: DecodeRows  # of the run: those that advance

    # -- coming up

    def load(self) -> None:
        """See `Engine`. Raises ModelError for the checkpoint, ConfigError for device, dtype and length."""
        self.build()
        for weights in self.shards:
            load_from_disk(weights, self.folder, tied=self.tied, threads=self._threads)

    def build(self) -> None:
        torch.set_num_threads(self._threads)
        config = read_decoder_config(self.folder)
        device = _device(self._device_name)
        dtype = _dtype(self._dtype_name, config, device)
        self.max_model_len = _max_len(self.max_model_len, config)
        kernels = load_kernels() if self._native and native_fits(dtype, device, self._threads) else None
        self._make_room(config, dtype, device)
        self._decoder = self._make_decoder(config, kernels)
        self._device = device
        self.reset()

    def _make_room(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """For all ranks' weights and KV. Raises ModelError where they cannot be dealt out so."""
        size = 1 if self.team is None else self.team.size
        own, *others = (Shard(rank, size) for rank in range(size))
        self.weights = allocate(config, dtype, device, own)
        lends = (held := self.weights.arena.region.device) is not None and held.lent
        places = [devices.beside(device, shard.rank) if lends else torch.device("cpu") for shard in others]
        self.shards = [self.weights, *(allocate(config, dtype, *place) for place in zip(places, others, strict=True))]
        heads = kv_heads_share(config, own)
        self.cache = KvCache(
            config.num_layers, self.num_blocks, self.block_size, heads, config.head_dim, dtype, device, shard=own
        )
        block_bytes = self.block_size * heads * config.head_dim * dtype.itemsize
        self.kv_pool = Pool(config.num_layers, self.num_blocks, block_bytes, size)
        what = f"KV of {config.name}: {config.num_layers} layers, {config.num_kv_heads} heads of {config.head_dim} in {dtype}"
        what = f"{what}, blocks of {self.block_size}, replica.tp = {size}"
        memory, held = self.cache.memory, self.cache.held
        self.kv_region = None if memory is None else Region(KV, memory, fingerprint=what, device=held)

    def _make_decoder(self, config: DecoderConfig, kernels: Kernels | None) -> Decoder | Leading:
        """Raises ReplicaFailed for a rank that does not come."""
        if self.team is None:
            return Decoder(config, self.weights, self.max_model_len, kernels)
        sizes = self.num_blocks, self.block_size
        shape = Shape(self.folder, self._threads, self._native, self.max_model_len, *sizes)
        group = assemble(self.team, shape, self.shards, self.cache)
        return Leading(Decoder(config, self.weights, self.max_model_len, kernels, group), self.team)

    @property
    def tied(self) -> bool:
        """The head is the embedding."""
        return self._decoder.config.tied

    @property
    def num_layers(self) -> int:
        return self._decoder.config.num_layers

    @property
    def layers_ready(self) -> int:
        return min(weights.arena.layers_ready for weights in self.shards)

    def _require(self, first: int, last: int, *, embed: bool = False, head: bool = False) -> None:
        """See `Arena.require`: in every rank's."""
        for weights in self.shards:
            weights.arena.require(first, last, embed=embed, head=head)

    def warm(self) -> None:
        """See `Engine`. Writes to a block that nobody holds; where all are held, much has run already."""
        noise_table(self._device)
        if (block := self._blocks.spare) is None:
            return
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        at = zero + block
        for decodes, spans in ((1, []), (0, [Span(0, 1, 0, at)])):
            tables = torch.full((decodes, 1), block, dtype=torch.int32, device=self._device)
            lengths = torch.ones(decodes, dtype=torch.int32, device=self._device)
            step = Step((), Batch(zero, zero, at * self.block_size, tables, lengths, 1, spans), [], zero)
            hidden = self.run_layers(step, 0, self.num_layers)
            with torch.inference_mode():
                self._decoder.logits(hidden)

    # -- requests

    def add(self, job: Job) -> None:
        self._states[job.request] = SequenceState(job, self._tokenizer, self.max_model_len)

    def preempt(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            for rows in self._groups.values():
                rows.leave(request)
            self._blocks.release(request)

    def forget(self, requests: Sequence[RequestId]) -> None:
        self.preempt(requests)
        self._batches.drop(requests)
        for request in requests:
            self._states.pop(request, None)

    def reset(self) -> None:
        self._states.clear()
        self._batches = Batches(self)
        self._blocks = BlockTables(self.num_blocks, self.block_size)
        self._groups = {0: self._no_rows()}
        self._rows = self._group = self._groups[0]
        self._cut = None

    def cut(self, run: RunId) -> None:
        self._cut = run

    # -- runs

    def run(self, action: RunSteps, emit: Callable[[Sequence[TokenOut]], None]) -> RunEnded:
        self._choose_rows(action)
        self._check(action)
        self._blocks.may_take = action.num_free
        evictable = iter(action.evictable)
        stopped: list[RequestId] = []
        done = 0
        while done < action.steps and not stopped and not (done and self._cut == action.run):
            chunks = [_piece(chunk, done) for chunk in action.chunks]
            tokens = self._step(chunks, evictable)
            done += 1
            stopped = sorted(out.request for out in tokens if out.finish is not None)
            if tokens:
                emit(tokens)
        self._blocks.may_take = -1
        self.forget(stopped)
        return RunEnded(action.run, done, tuple(stopped))

    def _choose_rows(self, action: RunSteps) -> None:
        """The run's group of decodes, after those that change theirs have done so; a pause is a run of no rows."""
        for moved in action.regrouped:
            to = self._groups.setdefault(moved.group, self._no_rows())
            for request in moved.requests:
                for rows in list(self._groups.values()):
                    if request in rows:
                        rows.give(request, to, self._blocks.tables[request])
                        break
        self._group = self._groups.setdefault(action.group, self._no_rows())
        self._rows = self._group if action.num_decodes else self._no_rows()

    def _no_rows(self) -> DecodeRows:
        return DecodeRows(self.block_size, -(-self.max_model_len // self.block_size))

    def _check(self, action: RunSteps) -> None:
        """The machine describes the decodes by two sums; both must be ours."""
        ours = len(self._rows), int(self._rows.lengths.sum()) + len(self._rows)
        if ours != (action.num_decodes, action.decode_context):
            theirs = f"{action.num_decodes} decodes over {action.decode_context} tokens"
            raise RuntimeError(f"the machine sees {theirs}, the engine {ours[0]} over {ours[1]}")

    def _step(self, chunks: Sequence[Chunk], evictable: Iterator[BlockHash]) -> list[TokenOut]:
        step = self._prepare(chunks, evictable, list(self._rows.requests))
        tokens = self.finish(step, self.run_layers(step, 0, self.num_layers))
        for chunk in chunks:
            self._blocks.file(chunk.request, self._states[chunk.request].job.block_hashes, chunk.offset + chunk.num_tokens)
        self._rows.tokens[:] = [out.token for out in tokens[: len(step.decoding)]]
        for chunk, out in zip(step.last, tokens[len(step.decoding) :], strict=True):
            length = chunk.offset + chunk.num_tokens
            self._group.join(chunk.request, out.token, length, self._blocks.tables[chunk.request])
        return tokens

    # -- steps in pieces

    def prepare(self, chunks: Sequence[Chunk], evictable: Sequence[BlockHash] = ()) -> Step:
        return self._prepare(chunks, iter(evictable), [])

    @torch.inference_mode()
    def run_layers(self, split: Step, first: int, last: int, hidden: Tensor | None = None) -> Tensor:
        self._require(first, last, embed=first == 0)
        x = self._decoder.embed(split.batch.tokens) if hidden is None else hidden
        return self._decoder.run(x, split.batch, self.cache, first, last)

    @torch.inference_mode()
    def finish(self, split: Step, hidden: Tensor) -> list[TokenOut]:
        self._require(0, 0, head=True)
        states = [self._states[request] for request in (*split.decoding, *(chunk.request for chunk in split.last))]
        draws = draw(self._decoder.logits(hidden, split.rows), states) if states else []
        return [state.accept(choice.token, choice.logprob, choice.top) for state, choice in zip(states, draws, strict=True)]

    @torch.inference_mode()
    def scores(self, split: Step, hidden: Tensor) -> list[list[float]]:
        """What `finish` would draw from: the logits of each row that yields a token."""
        self._require(0, 0, head=True)
        return self._decoder.logits(hidden, split.rows).tolist()

    def hidden_to_bytes(self, hidden: Tensor) -> memoryview:
        values: Any = hidden.contiguous().view(torch.uint8).cpu().numpy()
        return memoryview(values).cast("B")

    def hidden_from_bytes(self, split: Step, data: memoryview) -> Tensor:
        return self.hidden_of(data, len(split.batch.tokens))

    def hidden_of(self, data: memoryview, num_tokens: int) -> Tensor:
        """As `hidden_from_bytes`, of so many tokens. On a CPU it lies where `data` does, if that can be written to."""
        shape = num_tokens, self._decoder.config.hidden_size
        dtype = self.weights.embed.dtype
        if len(data) != shape[0] * shape[1] * dtype.itemsize:
            raise ValueError(f"a hidden state of {len(data)} bytes; {shape[0]} tokens of {shape[1]} {dtype} are expected")
        values = bytearray(data) if data.readonly else data
        return torch.frombuffer(values, dtype=dtype).view(shape).to(self._device)

    # -- batches that another engine has a part in

    def run_batch(
        self, action: RunLayers, emit: Callable[[Sequence[TokenOut]], None], given: Activations | None = None
    ) -> LayersEnded:
        if action.first_layer == 0:
            for chunk in action.chunks:
                self._states[chunk.request].share_nothing()
        tokens = self._batches.run(action, given)
        if tokens:
            emit(tokens)
        stopped = tuple(sorted(out.request for out in tokens if out.finish is not None))
        return LayersEnded(action.batch, action.last_layer, stopped)

    def activations(self, batch: int) -> Activations:
        return self._batches.give(batch)

    def _prepare(self, chunks: Sequence[Chunk], evictable: Iterator[BlockHash], decoding: list[RequestId]) -> Step:
        for chunk in chunks:
            self._begin(chunk)
        batch = self._batch(chunks, evictable, len(decoding))
        # Only rows that yield a token reach the head: the decodes, and the end of each prefill that is complete.
        ends = [span.stop - 1 for span, chunk in zip(batch.spans, chunks, strict=True) if chunk.last]
        rows = torch.tensor([*range(len(decoding)), *ends], dtype=torch.int64, device=self._device)
        return Step(chunks, batch, decoding, rows)

    # -- KV that comes and goes

    def pause(self, request: RequestId) -> int:
        state = self._states[request]
        for rows in self._groups.values():
            rows.leave(request)
        return len(state.tokens) - 1

    def blocks(self, request: RequestId) -> tuple[int, ...]:
        return tuple(self._blocks.tables[request])

    def adopt(self, job: Job, num_tokens: int, evictable: Sequence[BlockHash] = ()) -> tuple[int, ...]:
        self.add(job)
        self.evict(evictable)
        self._blocks.attach(job.request, ())
        return tuple(self._blocks.extend(job.request, num_tokens, iter(())))

    def evict(self, blocks: Sequence[BlockHash]) -> None:
        self._blocks.evict(blocks)

    def resume(self, request: RequestId, group: int = 0) -> None:
        tokens = self._states[request].tokens
        self._groups.setdefault(group, self._no_rows()).join(request, tokens[-1], len(tokens) - 1, self._blocks.tables[request])

    def _begin(self, chunk: Chunk) -> None:
        """On the first chunk of a prefill, take over what the prefix cache holds."""
        if chunk.request in self._blocks.tables:
            return
        state = self._states[chunk.request]
        self._blocks.attach(chunk.request, state.job.block_hashes[: chunk.num_cached // self.block_size])
        if state.num_output_tokens == len(state.job.output):
            state.num_cached_tokens = min(chunk.num_cached, state.num_prompt_tokens)

    # -- tensors

    def _batch(self, chunks: Sequence[Chunk], evictable: Iterator[BlockHash], num_decodes: int) -> Batch:
        """Pack the step, taking the KV blocks that it needs: all decoding sequences, or none of them."""
        rows, size = self._rows if num_decodes else self._no_rows(), self.block_size
        slots = [rows.step(lambda request, length: self._blocks.extend(request, length, evictable))]
        tokens, positions = [rows.tokens], [rows.lengths.astype(np.int64) - 1]
        spans = []
        start = len(rows)
        for chunk in chunks:
            end = chunk.offset + chunk.num_tokens
            blocks = self._blocks.extend(chunk.request, max(end, chunk.num_reserved * size), evictable)
            table = np.array(blocks[: -(-end // size)], dtype=np.int64)
            at = np.arange(chunk.offset, end, dtype=np.int64)
            slots.append(table[at // size] * size + at % size)
            tokens.append(np.array(self._states[chunk.request].tokens[chunk.offset : end], dtype=np.int64))
            positions.append(at)
            spans.append(Span(start, start + chunk.num_tokens, chunk.offset, self._put(table)))
            start += chunk.num_tokens
        longest = int(rows.lengths.max()) if len(rows) else 0
        return Batch(
            tokens=self._put(np.concatenate(tokens)),
            positions=self._put(np.concatenate(positions)),
            slots=self._put(np.concatenate(slots)),
            tables=self._put(rows.tables[:, : -(-longest // size)]),
            lengths=self._put(rows.lengths),
            longest=longest,
            spans=spans,
        )

    def _put(self, array: NDArray[Any]) -> Tensor:
        """To the model's device; on a CPU a window on the same memory."""
        return torch.from_numpy(array).to(self._device)


def _piece(chunk: Chunk, step: int) -> Chunk:
    """What is left of a chunk's description after `step` steps of its run."""
    if step == 0:
        return chunk
    return Chunk(chunk.request, chunk.offset + step * chunk.num_tokens, chunk.num_tokens, 0, chunk.last)


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name.split(":")[0] != "cuda":
        raise ConfigError(f"serve.device is {name!r}; use 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this PyTorch is built without CUDA)"
        raise ConfigError(f"serve.device is {name!r}, but there is no CUDA device here{built}; use 'cpu'")
    return torch.device(name)


def _dtype(name: str, config: DecoderConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "fp32" if device.type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"replica.dtype is {name!r}; the built-in engine computes in {', '.join(DTYPES)}")
    return DTYPES[name]


def _max_len(wanted: int, config: DecoderConfig) -> int:
    """The model's own limit, or what is wanted if that is within it; dynamic rotary embedding reaches `factor` times as far."""
    own = config.max_position
    limit = int(own * config.rope.factor) if config.rope.kind == "dynamic" else own
    if wanted > limit:
        raise ConfigError(f"replica.max_model_len is {wanted}; {config.name} reaches {limit} tokens")
    return wanted or own
