"""Rotary frequencies and angles. Knows no heads and no cache.

Everything is computed in float32, in the order in which models were trained: at position 1,500 a rounding more or less in a
frequency already shows in the fourth digit of the logits.
"""

import math

import torch
from torch import Tensor

from squall.live.engine.architecture import Rope


def frequencies(rope: Rope, dim: int, max_len: int) -> tuple[Tensor, float]:
    """Angle a position for each of `dim` / 2 pairs, and what cosine and sine are multiplied by.

    Sources: linear, Chen et al. 2023 (arXiv 2306.15595); dynamic, NTK-aware scaling; yarn, Peng et al. 2023 (arXiv
    2309.00071); llama3, the Llama 3.1 model card.

    Args:
        max_len: the longest sequence that will be served. Only `dynamic` looks at it: its base is the one for this length,
            the same for all sequences, since keys that are in the cache cannot be rotated again as a sequence grows.
    """
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    theta = rope.theta
    if rope.kind == "dynamic" and max_len > rope.original_max_position:
        stretch = rope.factor * max_len / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    inverse = 1.0 / _powers(theta, dim)
    if rope.kind == "linear":
        inverse /= rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    return inverse, 1.0


def angles(inverse: Tensor, scale: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, dim / 2], float32, of `positions` [tokens]."""
    turned = positions.to(torch.float32).unsqueeze(1) * inverse
    return turned.cos() * scale, turned.sin() * scale


def _powers(theta: float, dim: int) -> Tensor:
    return torch.as_tensor(theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = rope.original_max_position * inverse / (2 * math.pi)  # a pair makes in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    longest = torch.where(turns < rope.low_freq_factor, inverse / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, inverse, longest)


def _yarn(rope: Rope, dim: int) -> tuple[Tensor, float]:
    powers = _powers(rope.theta, dim)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep, _yarn_scale(rope)


def _yarn_scale(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
