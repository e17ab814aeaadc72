"""What is drawn, from distributions that can be counted by hand."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from squall.live.engine.interface import Job, Sampling
from squall.live.engine.sampling import Draw, draw, exponential, noise_table
from squall.live.engine.sequence import SequenceState
from squall.live.engine.tokenizer import ByteTokenizer

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])


def state_of(seed: int = 0, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **sampling: object) -> SequenceState:
    given = Sampling(**{"max_tokens": 100, "seed": seed, **sampling})  # type: ignore[arg-type]
    return SequenceState(Job(seed, prompt, given, output), ByteTokenizer(), 1000)


def logits() -> Tensor:
    row = torch.full((258,), -torch.inf)
    row[:5] = PROBABILITIES.log()
    return row


def one(row: Tensor, **sampling: object) -> Draw:
    (choice,) = draw(row.unsqueeze(0), [state_of(**sampling)])  # type: ignore[arg-type]
    return choice


def shares(**sampling: object) -> Tensor:
    """How often each of the first five tokens is drawn, over many seeds."""
    count = 1200
    states = [state_of(seed, **sampling) for seed in range(count)]  # type: ignore[arg-type]
    counts = Counter(choice.token for choice in draw(logits().expand(count, -1), states))
    assert max(counts) < 5
    return torch.tensor([counts[token] / count for token in range(5)])


def normalised(*weights: float) -> Tensor:
    return torch.tensor(weights) / sum(weights)


CPU = torch.device("cpu")
FIRST = [0.158755615, 0.644943714, 0.237702578, 0.901396394]


def test_noise_is_exponential_and_depends_on_seed_and_position_alone() -> None:
    table = noise_table(CPU)
    assert table.min() > 0
    assert table.isfinite().all()
    for quantile in (1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99):
        share = float((table < -math.log1p(-quantile)).double().mean())
        assert share == pytest.approx(quantile, abs=5 * math.sqrt(quantile * (1 - quantile) / len(table)))
    for apart in (1, 2, 7, 128, 1024):
        assert torch.corrcoef(torch.stack((table[:-apart], table[apart:])))[0, 1].abs() < 0.005
    assert table[:4].tolist() == pytest.approx(FIRST, rel=1e-6)  # the same on any machine
    assert torch.equal(exponential(3, 4, 9, CPU), exponential(3, 4, 9, CPU))
    begins = {float(exponential(seed, position, 50_000, CPU)[0]) for seed in (-1, 0, 1, 2**63) for position in range(50)}
    assert len(begins) == 200


def test_logits_that_differ_in_their_last_digits_draw_the_same_tokens() -> None:
    """A flat distribution, in which every place in a cumulative one would shift by more than a token's share."""
    noise = torch.Generator().manual_seed(2)
    row = torch.randn(50_000, generator=noise)
    other = row + 4e-6 * torch.randn(50_000, generator=noise)
    assert [one(row, seed=seed).token for seed in range(200)] == [one(other, seed=seed).token for seed in range(200)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, normalised(*(p * p for p in PROBABILITIES.tolist()))),
        ({"temperature": 1e-9}, normalised(0, 1, 0, 0, 0)),
        ({"top_k": 2}, normalised(0, 0.4, 0, 0.25, 0)),
        ({"top_k": 1}, normalised(0, 1, 0, 0, 0)),
        ({"top_p": 0.5}, normalised(0, 0.4, 0, 0.25, 0)),
        ({"top_p": 0.66}, normalised(0, 0.4, 0, 0.25, 0.2)),
        ({"top_p": 1e-9}, normalised(0, 1, 0, 0, 0)),
        ({"min_p": 0.3}, normalised(0, 0.4, 0, 0.25, 0.2)),
        ({"top_k": 3, "top_p": 0.7}, normalised(0, 0.4, 0, 0.25, 0)),
        ({"logit_bias": {0: 100.0}}, normalised(1, 0, 0, 0, 0)),
        ({"logit_bias": {1: -100.0}}, normalised(0.05, 0, 0.1, 0.25, 0.2)),
    ],
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(sampling: dict[str, object], expected: Tensor) -> None:
    torch.testing.assert_close(shares(**sampling), expected, atol=0.05, rtol=0)


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    row = torch.zeros(5000)
    tokens = {one(row, seed=seed, top_p=0.5).token for seed in range(300)}
    assert len(tokens) > 200  # all weigh the same, so none is left out
    row = torch.linspace(0.2, 0, 5000)
    assert max(one(row, seed=seed, top_p=0.5).token for seed in range(300)) < 2600


def test_greedy_is_the_most_likely_whatever_the_seed() -> None:
    assert {one(logits(), seed=seed, temperature=0.0).token for seed in range(9)} == {1}


def test_penalties_count_what_was_said() -> None:
    row = torch.tensor([0.0, 2.0, 1.9, 1.8, -1.0])
    assert one(row, temperature=0.0, output=(1,), presence_penalty=0.15).token == 2
    assert one(row, temperature=0.0, output=(1, 1, 2), frequency_penalty=0.15).token == 3
    assert one(row, temperature=0.0, output=(2, 2), frequency_penalty=0.15).token == 1
    assert one(row, temperature=0.0, prompt=(1,), presence_penalty=2.0, frequency_penalty=2.0).token == 1


def test_repetition_counts_the_prompt_too_and_pushes_down_from_both_sides_of_zero() -> None:
    row = torch.tensor([0.0, 2.0, 1.9, 1.8, -1.0])
    assert one(row, temperature=0.0, prompt=(1,), output=(2,), repetition_penalty=1.2).token == 3
    low = torch.tensor([-1.0, -1.1])
    assert one(low, temperature=0.0, prompt=(0,), repetition_penalty=1.2).token == 1


def test_a_sequence_does_not_end_before_min_tokens() -> None:
    row = torch.zeros(258)
    row[257], row[65], row[66] = 9.0, 8.0, 7.0
    sampling = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (65,)}
    assert one(row, **sampling).token == 66
    assert one(row, **sampling, output=(1, 2)).token == 257


def test_logprobs_are_those_of_the_model_whatever_is_done_to_the_choice() -> None:
    choice = one(logits(), temperature=0.0, logit_bias={2: 100.0}, top_k=1, logprobs=2)
    assert choice.token == 2
    assert choice.logprob == pytest.approx(float(PROBABILITIES[2].log()), abs=1e-5)
    assert [token for token, _ in choice.top] == [1, 3]
    assert [value for _, value in choice.top] == pytest.approx(PROBABILITIES[[1, 3]].log().tolist(), abs=1e-5)
    assert one(logits(), logprobs=0).top == ()
    assert one(logits()).logprob is None


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    states = [
        state_of(1), state_of(2, top_p=0.9), state_of(3, temperature=0.0), state_of(4, top_k=5, logprobs=1),
        state_of(5, presence_penalty=1.0, output=(7, 8)), state_of(6, min_p=0.1),
    ]  # fmt: skip
    before = rows.clone()
    together = draw(rows, states)
    assert together == [draw(row.unsqueeze(0), [state])[0] for row, state in zip(rows, states, strict=True)]
    assert torch.equal(rows, before)


def test_the_noise_of_a_token_is_that_of_its_position() -> None:
    fresh = state_of(9, prompt=(1, 2, 3))
    for token in (4, 5):
        fresh.accept(token)
    continued = state_of(9, prompt=(1, 2, 3), output=(4, 5))
    row = torch.zeros(1, 258)
    assert draw(row, [fresh]) == draw(row, [continued])
    assert len({draw(row, [state_of(9, prompt=(1,) * length)])[0].token for length in range(1, 30)}) > 20


@pytest.mark.parametrize(
    ("row", "sampling"),
    [
        (logits(), {"temperature": 5e-324}),
        (logits(), {"temperature": 1e-300, "top_p": 0.5, "top_k": 3, "min_p": 0.1}),
        (logits(), {"min_tokens": 9, "stop_token_ids": tuple(range(258))}),
        (torch.full((258,), torch.nan), {}),
        (torch.full((258,), torch.nan), {"top_p": 0.5, "top_k": 3}),
        (torch.full((258,), torch.inf), {}),
    ],
)
def test_what_makes_no_distribution_still_gives_a_token(row: Tensor, sampling: dict[str, object]) -> None:
    assert 0 <= one(row, **sampling).token < 258


def test_the_coldest_temperature_is_greedy() -> None:
    assert {one(logits(), seed=seed, temperature=5e-324).token for seed in range(20)} == {1}
