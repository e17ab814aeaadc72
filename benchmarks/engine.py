"""What serving costs the engine beside a bare forward pass. Claim: at least 0.9 of its speed, in every shape.

    python benchmarks/engine.py [--smoke]

Bare is the least that PyTorch has to do for the same tokens: the same weights (fused in the same way) through F.linear,
F.rms_norm and F.scaled_dot_product_attention, over one dense KV cache a layer, all sequences equally long; no pages, no requests,
no sampling but argmax. The engine runs whole steps as a worker asks for them, with native kernels and without. Both take turns
within a round; a ratio is the median over the rounds' ratios, a time the median of CPU seconds of the one thread that computes.
Weights are the embedded model's where `squall model pull smollm2` put it; otherwise random ones of the same shape, which take
as long.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from squall.core.actions import Chunk, RunSteps
from squall.errors import ModelError
from squall.live import models
from squall.live.engine.architecture import DecoderConfig, read_decoder_config
from squall.live.engine.checkpoint import load_checkpoint
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.rope import angles, frequencies
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.engine.weights import LayerWeights, Weights, allocate, pieces

CLAIM = 0.9
CONTEXT = 256  # tokens in the cache when decoding begins
SHAPE = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


class Bare:
    """The forward pass and nothing else."""

    def __init__(self, config: DecoderConfig, weights: Weights, sequences: int, max_len: int) -> None:
        self.config = config
        self.weights = weights
        self.eps = config.rms_norm_eps
        self.inverse, self.scale = frequencies(config.rope, self.config.head_dim, max_len)
        shape = (2, sequences, self.config.num_kv_heads, max_len, self.config.head_dim)
        self.caches = [torch.randn(shape) for _ in range(self.config.num_layers)]

    @torch.inference_mode()
    def step(self, tokens: Tensor, at: int) -> Tensor:
        """The next token of every sequence; `tokens` [sequences, new] go to places `at` and after."""
        x = F.embedding(tokens, self.weights.embed)
        positions = torch.arange(at, at + tokens.shape[1])
        turn = angles(self.inverse, self.scale, positions)
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            x = x + self._attention(F.rms_norm(x, x.shape[-1:], layer.attn_norm, self.eps), layer, cache, at, turn)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        last = F.rms_norm(x[:, -1], x.shape[-1:], self.weights.norm, self.eps)
        return F.linear(last, self.weights.head).argmax(dim=-1)

    def _attention(self, x: Tensor, layer: LayerWeights, cache: Tensor, at: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        sequences, new, _ = x.shape
        qkv = F.linear(x, layer.qkv).view(sequences, new, heads + 2 * kv_heads, dim).transpose(1, 2)
        turned, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        a, b = turned.chunk(2, dim=-1)
        cosine, sine = turn
        turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
        cache[0, :, :, at : at + new] = turned[:, heads:]
        cache[1, :, :, at : at + new] = v
        keys, values = cache[:, :, :, : at + new]
        out = F.scaled_dot_product_attention(turned[:, :heads], keys, values, is_causal=new > 1, enable_gqa=True)
        return F.linear(out.transpose(1, 2).reshape(sequences, new, heads * dim), layer.out)


def engine_of(folder: Path, native: bool) -> TorchEngine:
    engine = TorchEngine(folder, ByteTokenizer(), num_blocks=16 * (CONTEXT + 256) // 16, native=native)
    engine.load()
    engine.warm()
    return engine


def begin(engine: TorchEngine, sequences: int, length: int) -> Callable[[], None]:
    """Whole prompts in one step, as one call."""
    engine.reset()
    for request in range(sequences):
        prompt = tuple((7 * request + 11 * i) % 256 for i in range(length))
        engine.add(Job(request, prompt, Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)))
    action = RunSteps(1, 1, 0, 0, tuple(Chunk(request, 0, length, 0, True) for request in range(sequences)))
    return lambda: ignore(engine.run(action, ignore))


def ignore(_: object) -> None:
    """Nobody reads the tokens."""


def cpu_s(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def prefill(length: int, bare: Bare, engines: list[TorchEngine], rounds: int) -> list[list[float]]:
    """CPU seconds of every round: bare, then each engine."""
    tokens = torch.arange(length).unsqueeze(0) % 256

    def once() -> list[float]:
        return [cpu_s(lambda: bare.step(tokens, 0)), *(cpu_s(begin(engine, 1, length)) for engine in engines)]

    return [once() for _ in range(rounds + 1)][1:]


def decode(sequences: int, bare: Bare, engines: list[TorchEngine], rounds: int) -> list[list[float]]:
    for engine in engines:
        begin(engine, sequences, CONTEXT)()
    tokens = torch.zeros((sequences, 1), dtype=torch.int64)
    results = []
    for step in range(rounds + 1):
        action = RunSteps(2 + step, 1, sequences, sequences * (CONTEXT + 1 + step))
        times = [cpu_s(lambda at=CONTEXT + step: bare.step(tokens, at))]  # type: ignore[misc]
        times += [cpu_s(lambda engine=engine, action=action: engine.run(action, ignore)) for engine in engines]  # type: ignore[misc]
        results.append(times)
    return results[1:]


def random_checkpoint(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    noise = torch.Generator().manual_seed(1)
    parts = [part for piece in pieces(read_decoder_config(folder)) for part in piece.parts]
    save_file({part.name: torch.randn(part.shape, generator=noise) * 0.03 for part in parts}, folder / "model.safetensors")
    return folder


def report(name: str, tokens: int, results: list[list[float]]) -> float:
    """Print a row; returns the better engine's ratio."""
    medians = [median(times[i] for times in results) for i in range(3)]
    ratios = [median(times[0] / times[i] for times in results) for i in (1, 2)]
    speeds = "".join(f"{tokens / seconds:>12,.0f}" for seconds in medians)
    print(f"{name:<16}{speeds}{ratios[0]:>10.2f}{ratios[1]:>10.2f}")
    return ratios[0]


def main() -> int:
    smoke = "--smoke" in sys.argv
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        try:
            folder = models.find("smollm2")
        except ModelError:
            folder = random_checkpoint(Path(scratch))
        config = read_decoder_config(folder)
        weights = allocate(config, torch.float32, torch.device("cpu"))
        load_checkpoint(folder, weights.views)
        engines = [engine_of(folder, native=True), engine_of(folder, native=False)]
    print(f"tokens a CPU second, one thread, float32; decoding from {CONTEXT} tokens of context")
    print(f"{'':<16}{'bare':>12}{'engine':>12}{'no native':>12}{'ratio':>10}{'ratio':>10}")
    worst = []
    for length in (128,) if smoke else (128, 512, 1024):
        bare = Bare(config, weights, 1, length)
        worst.append(report(f"prefill {length}", length, prefill(length, bare, engines, 1 if smoke else 3)))
    for sequences in (1, 4) if smoke else (1, 4, 8, 16):
        rounds = 2 if smoke else 15
        bare = Bare(config, weights, sequences, CONTEXT + rounds + 1)
        worst.append(report(f"decode {sequences}", sequences, decode(sequences, bare, engines, rounds)))
    print(f"\nthe slowest shape runs at {min(worst):.2f} of bare; claimed: {CLAIM}")
    return int(min(worst) < CLAIM and not smoke)


if __name__ == "__main__":
    sys.exit(main())
