"""Small checkpoints with random weights, the `transformers` oracle, and an engine driven by the real replica machine."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.core.actions import Forget, Preempt, RunSteps
from squall.core.events import StepsDone, Submitted, Woke
from squall.core.replica import Replica
from squall.core.types import Request
from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.attention import Batch, KvCache, Span
from squall.live.engine.checkpoint import load_checkpoint
from squall.live.engine.decoder import Decoder
from squall.live.engine.interface import Job, TokenOut
from squall.live.engine.kernels import Kernels, load_kernels
from squall.live.engine.torch_engine import TorchEngine
from squall.live.engine.weights import allocate
from squall.policies.batching import Vllm

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}

Checkpoint = Callable[..., Path]
Oracle = Callable[..., Tensor]
Forward = Callable[..., Tensor]
Serve = Callable[..., dict[int, list[TokenOut]]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Makes a checkpoint of random weights with `transformers`: checkpoint("qwen3", num_hidden_layers=2)."""

    def make(family: str = "llama", max_shard_size: str = "1GB", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoConfig, AutoModelForCausalLM

            torch.manual_seed(1)
            config = AutoConfig.for_model(family, **{**SIZES, **changes})
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(checkpoint: Checkpoint) -> Path:
    return checkpoint()


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Logits of `transformers` for the last `keep` positions of a sequence (0: all), [tokens, vocabulary]."""
    loaded: dict[Path, Any] = {}

    def logits(folder: Path, tokens: Sequence[int], keep: int = 0) -> Tensor:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM

            if folder not in loaded:
                loaded[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return loaded[folder](torch.tensor([list(tokens)]), logits_to_keep=keep).logits[0]  # type: ignore[no-any-return]

    return logits


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    found = load_kernels()
    if found is None:
        pytest.skip("no C++ compiler here, so no native kernels")
    return found


def open_decoder(folder: Path, kernels: Kernels | None, max_len: int = 256) -> Decoder:
    config = read_decoder_config(folder)
    weights = allocate(config, torch.float32, torch.device("cpu"))
    load_checkpoint(folder, weights.views, frozenset({"lm_head.weight"} if config.tied else ()))
    return Decoder(config, weights, max_len, kernels)


@pytest.fixture(scope="session")
def forward() -> Forward:
    """Our logits for every position, the sequence taken in pieces: `sizes` tokens a step, a 1 being a decode.

    KV blocks of 4 tokens are handed out in an order of no kind; `cut` splits the layers into two ranges.
    """

    def run(
        folder: Path,
        tokens: Sequence[int],
        sizes: Sequence[int] | None = None,
        kernels: Kernels | None = None,
        cut: int | None = None,
        max_len: int = 256,
    ) -> Tensor:
        decoder = open_decoder(folder, kernels, max_len)
        config = decoder.config
        num_blocks = -(-len(tokens) // 4)
        cache = KvCache(
            config.num_layers, num_blocks + 3, 4, config.num_kv_heads, config.head_dim, torch.float32, torch.device("cpu")
        )
        blocks = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(2))[:num_blocks]
        rows, offset = [], 0
        with torch.inference_mode():
            for size in sizes or [len(tokens)]:
                batch = one_sequence(tokens[offset : offset + size], offset, blocks)
                x = decoder.embed(batch.tokens)
                for first, last in ((0, config.num_layers),) if cut is None else ((0, cut), (cut, config.num_layers)):
                    x = decoder.run(x, batch, cache, first, last)
                rows.append(decoder.logits(x))
                offset += size
        return torch.cat(rows)

    return run


def one_sequence(tokens: Sequence[int], offset: int, blocks: Tensor) -> Batch:
    """A batch with one chunk, or one decode where there is one token and something before it."""
    positions = torch.arange(offset, offset + len(tokens))
    slots = blocks[positions // 4] * 4 + positions % 4
    decode = len(tokens) == 1 and offset > 0
    used = blocks[: -(-(offset + len(tokens)) // 4)]
    tables = used.to(torch.int32).unsqueeze(0) if decode else torch.empty((0, 1), dtype=torch.int32)
    lengths = torch.tensor([offset + 1] if decode else [], dtype=torch.int32)
    spans = [] if decode else [Span(0, len(tokens), offset, used)]
    return Batch(torch.tensor(tokens), positions, slots, tables, lengths, offset + 1 if decode else 0, spans)


class Driven:
    """An engine and the replica machine that plans for it, in one thread and without a clock.

    Attributes:
        machine: the replica.
        actions: what it asked for.
        outputs: what the engine said, by request.
    """

    def __init__(self, engine: TorchEngine, policy: Vllm) -> None:
        self.machine = Replica(0, policy, engine.num_blocks, engine.block_size)
        self.actions: list[Any] = []
        self.outputs: dict[int, list[TokenOut]] = {}
        self._engine = engine
        self._now = 0

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self._engine.add(job)
            self.outputs[job.request] = []
            self._now += 1
            sizes = (len(job.prompt), job.sampling.max_tokens, len(job.output))
            self._perform(self.machine.handle(Submitted(Request(job.request, self._now, *sizes, job.block_hashes)), self._now))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.machine.wake_at is not None:
            self._perform(self.machine.handle(Woke(), self._now))

    def _perform(self, actions: list[Any]) -> None:
        while actions:
            self.actions.extend(actions)
            following: list[Any] = []
            for action in actions:
                if isinstance(action, RunSteps):
                    ended = self._engine.run(action, self._take)
                    following = self.machine.handle(StepsDone(ended.run, ended.steps, ended.stopped), self._now)
                elif isinstance(action, Preempt):
                    self._engine.preempt(action.requests)
                elif isinstance(action, Forget):
                    self._engine.forget(action.requests)
            actions = following

    def _take(self, tokens: Sequence[TokenOut]) -> None:
        for token in tokens:
            self.outputs[token.request].append(token)


@pytest.fixture(scope="session")
def drive() -> Callable[..., Driven]:
    """Jobs through an engine, planned by the real machine: drive(engine, *jobs, max_num_batched_tokens=64)."""

    def run(engine: TorchEngine, *jobs: Job, **policy: Any) -> Driven:
        driven = Driven(engine, Vllm(**policy))
        driven.submit(*jobs)
        driven.run()
        return driven

    return run


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


@pytest.fixture(scope="session")
def edit() -> Callable[..., None]:
    return edit_json
