"""From logits to tokens. Knows no KV, no text and no batch: a row is drawn by itself.

Noise is a hash of (seed, position, token), so a token depends on its own sequence alone: not on what else runs, nor on a restart.
Every token of the vocabulary has noise of its own and the best one wins, so that a logit that is off in its last digits, as in
another batch, changes the winner only where two are as good as each other. (A place in the cumulative distribution would
shift with every logit before it.)
Order: logit bias, penalties, forbidden tokens, temperature, min-p, top-k, top-p. Log-probabilities are those of the model's
own distribution, before all of these.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import torch
from msgspec import Struct
from torch import Tensor

from squall.live.engine.interface import Sampling
from squall.live.engine.sequence import Candidate, SequenceState

LOWEST_TEMPERATURE = 1e-6
"""What is colder counts as this: single precision cannot divide by less, and the best token has all the weight long before."""


class Draw(Struct, frozen=True):
    """A chosen token; `logprob` and `top` where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()


def draw(logits: Tensor, states: Sequence[SequenceState]) -> list[Draw]:
    """The next token of every sequence. `logits` [len(states), vocabulary], float32, stay as they are."""
    if all(_is_plain(state.job.sampling) for state in states):
        return [Draw(token) for token in logits.argmax(dim=-1).tolist()]
    return [_draw_row(row, state) for row, state in zip(logits, states, strict=True)]


@cache
def noise_table(device: torch.device) -> Tensor:
    """Exponentially distributed numbers, float32, the same on any machine. A row's noise is a piece of them: to make as many anew
    for each token takes longer than all else that a draw does.

    The finisher of MurmurHash3 (Appleby, public domain) over the numbers from 1, in 32 bits that wrap. Of its bits 31 count, so
    that the smallest results, which decide, have no fewer digits than others.
    """
    mixed = torch.arange(1, 1 + (1 << 21), dtype=torch.int32) * -0x61C88647
    for shift, kept, factor in ((16, 0xFFFF, -0x7A143595), (13, 0x7FFFF, -0x3D4D51CB)):
        mixed ^= (mixed >> shift) & kept
        mixed *= factor
    mixed ^= (mixed >> 16) & 0xFFFF
    even = ((mixed & 0x7FFF_FFFF).to(torch.float64) + 0.5) / 2.0**31
    return -torch.log1p(-even).to(torch.float32).to(device)


def exponential(seed: int, position: int, count: int, device: torch.device) -> Tensor:
    """So many exponentially distributed numbers, float32, that (seed, position) always gives: one for each token."""
    table = noise_table(device)
    key = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    begin = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % (table.shape[0] - count + 1)
    return table[begin : begin + count]


def _is_plain(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 and sampling.logprobs is None and not _adjusts(sampling)


def _adjusts(sampling: Sampling) -> bool:
    """Whether anything changes the logits before the choice."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    return bool(penalties or sampling.logit_bias or sampling.min_tokens)


def _draw_row(row: Tensor, state: SequenceState) -> Draw:
    sampling = state.job.sampling
    adjusted = _adjust(row.clone(), state) if _adjusts(sampling) else row
    if sampling.temperature == 0.0:
        token = int(adjusted.argmax())
    else:
        token = _choose(adjusted, sampling, len(state.tokens))
    if sampling.logprobs is None:
        return Draw(token)
    normaliser = float(row.logsumexp(dim=0))
    best = row.topk(min(sampling.logprobs, row.shape[0]))
    top = zip(best.indices.tolist(), (best.values - normaliser).tolist(), strict=True)
    return Draw(token, float(row[token]) - normaliser, tuple(top))


def _adjust(row: Tensor, state: SequenceState) -> Tensor:
    sampling = state.job.sampling
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += row.new_tensor(list(sampling.logit_bias.values()))
    if sampling.repetition_penalty != 1.0:
        seen = list(set(state.tokens))
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(state.tokens[state.num_prompt_tokens :])
        row[list(counts)] -= sampling.frequency_penalty * row.new_tensor(list(counts.values())) + sampling.presence_penalty
    if forbidden := state.forbidden:
        row[list(forbidden)] = -torch.inf
    return row


def _choose(row: Tensor, sampling: Sampling, position: int) -> int:
    """Who comes first where every token comes after an exponential time, at a rate that is its weight.

    A row that makes no distribution (all tokens forbidden, or a model that yields no numbers) gives a token all the same: one
    strange request must not take down the replica that it shares with others.
    """
    weights = ((row - row.max()) / max(sampling.temperature, LOWEST_TEMPERATURE)).exp()  # the best token weighs 1
    if sampling.min_p > 0.0:
        weights = weights * (weights >= sampling.min_p)
    if 0 < sampling.top_k < weights.shape[0]:
        weights = weights * (weights >= weights.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1.0:
        weights = weights * (weights >= _nucleus_floor(weights, sampling.top_p))
    if not 0.0 < float(weights.sum()) < torch.inf:  # also when it is no number
        return int(row.argmax())
    return int((exponential(sampling.seed, position, row.shape[0], row.device) / weights).argmin())


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """The smallest weight among the fewest tokens that make up `top_p`. A few best ones are nearly always enough to find it."""
    wanted = top_p * float(weights.sum(dtype=torch.float64))
    size = min(256, weights.shape[0])
    while True:
        best = weights.topk(size).values
        reached = best.to(torch.float64).cumsum(dim=0) >= wanted
        if bool(reached[-1]) or size == weights.shape[0]:
            return best[int(reached.to(torch.int8).argmax())] if bool(reached[-1]) else best[-1]
        size = min(size * 16, weights.shape[0])
