"""A Llama-family decoder that runs any range of its layers over a packed batch. Knows no requests and no sampling.

A layer reads the residual stream and returns a new one, and writes its own keys and values: it can be run again after an
interruption, and layers [0, k) here and [k, L) elsewhere give what [0, L) gives.

Under tensor parallelism every rank runs this over its shard (see `weights`): the residual stream is the same everywhere, as the
ranks add up what attention and MLP contribute, and their parts of the vocabulary's embeddings; rank 0 gathers the scores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from squall.live.engine.architecture import DecoderConfig
from squall.live.engine.attention import Batch, KvCache, attend, rope_store
from squall.live.engine.collectives import Group
from squall.live.engine.kernels import Kernels
from squall.live.engine.rope import angles, frequencies
from squall.live.engine.weights import LayerWeights, Weights, kv_heads_share, vocabulary_share


class Decoder:
    """The forward pass.

    Args:
        max_len: the longest sequence that will be served.
        kernels: native ones for float32 on one CPU thread; None computes all with PyTorch.
        group: of the ranks that hold the model's shards; None where it is whole.

    Attributes:
        num_heads, num_kv_heads: of this shard.
    """

    def __init__(
        self, config: DecoderConfig, weights: Weights, max_len: int, kernels: Kernels | None, group: Group | None = None
    ) -> None:
        self.config = config
        self.num_heads = config.num_heads // weights.shard.size
        self.num_kv_heads = kv_heads_share(config, weights.shard)
        self._group = group
        self.weights = weights
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        inverse, self._rope_scale = frequencies(config.rope, config.head_dim, max_len)
        self._inverse = inverse.to(weights.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first layer: [num_tokens, hidden]."""
        table, shard = self.weights.embed, self.weights.shard
        if self._group is None:
            return F.embedding(tokens, table)
        own = tokens - vocabulary_share(self.config, shard) * shard.rank
        here = (own >= 0) & (own < len(table))
        return self._group.sum(F.embedding(own.clamp(0, len(table) - 1), table) * here.unsqueeze(1))

    def run(self, x: Tensor, batch: Batch, cache: KvCache, first: int, last: int) -> Tensor:
        """The residual stream after layers [first, last), which fill their part of the cache."""
        turn = angles(self._inverse, self._rope_scale, batch.positions)
        for index in range(first, last):
            layer = self.weights.layers[index]
            x = x + self._attention(x, layer, batch, cache.keys[index], cache.values[index], self.config.windows[index], turn)
            x = x + self._mlp(x, layer)
        return x

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Float32 scores of the next token, [rows, vocabulary], from rows of the residual stream after the last layer.

        Of all rows when None. Other ranks than 0 get their own part of the vocabulary.
        """
        chosen = x if rows is None else x[rows]
        scores = self._linear(self._norm(chosen, self.weights.norm), self.weights.head, None)
        if self._group is not None:
            scores = self._group.gather(scores, self.config.vocab_size)
        return scores.float()

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        window: int,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self._linear(self._norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias).view(
            -1, heads + 2 * kv_heads, self.config.head_dim
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = self._norm(qkv[:, :heads], layer.q_norm)
            qkv[:, heads:-kv_heads] = self._norm(qkv[:, heads:-kv_heads], layer.k_norm)
        store = rope_store if self._kernels is None else self._kernels.rope_store
        store(qkv, *turn, batch.slots, keys, values)
        return self._led_back(attend(qkv, keys, values, batch, window, self._kernels), layer.out, layer.out_bias)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        both = self._linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = both.chunk(2, dim=-1)
        return self._led_back(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _led_back(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """To the residual stream: the sum over all ranks, and the bias once."""
        if self._group is None:
            return self._linear(x, weight, bias)
        total = self._group.sum(self._linear(x, weight, None))
        return total if bias is None else total.add_(bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, self._kernels)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n], by whichever kernel is faster."""
    if kernels is not None and kernels.suits(x, weight):
        return kernels.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def native_fits(dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Whether the native kernels compute for such an engine."""
    return dtype is torch.float32 and device.type == "cpu" and threads == 1
