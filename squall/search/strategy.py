"""In which order configurations are looked into, and which are not worth it.

Exhaustive: from the highest bound down. Whose bound does not reach the best found so far is done with, without any simulation;
whoever fails at the rate that would make it better is done with after one, which ends as soon as that is certain. Halving does
the same on short samples first and takes the better part along. Both find what trying everything would find, as far as more
load never helps; halving also trusts that a short sample ranks the best among the better part. Knows no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from squall.search.inquiry import Candidate, Inquiry
from squall.search.result import Result
from squall.search.space import Choice

FIRST_ROUND = 8
"""Rounds grow from here: the sooner something good is known, the less is worth looking into."""

SHARES = (0.25, 1.0)
"""Of the sample, that halving goes through."""

PART = 4
"""One in so many is taken along to the next share, and a margin."""

REPLICAS = "fleet.replicas"


def ranked(results: Sequence[Result]) -> list[Result]:
    """Those that were measured, the best first; of equals the first in the space."""
    done = [result for result in results if result.score is not None]
    return sorted(done, key=lambda result: (-(result.score or 0.0), result.number))


def worth(results: Sequence[Result], top: int) -> float | None:
    """The score that must be exceeded to be among the best `top`; None while there are fewer."""
    best = ranked(results)
    return best[top - 1].score if len(best) >= top else None


def exhaustive(
    inquiry: Inquiry, candidates: Sequence[Candidate], top: int, *, keep: bool = True, known: float | None = None
) -> list[Result]:
    """Every candidate's result, the best `top` measured to the end, if they are better than what is `known` already."""
    waiting = sorted(candidates, key=lambda candidate: (-candidate.ceiling, candidate.job.number))
    found: list[Result] = []
    size = min(FIRST_ROUND, inquiry.search.round)
    while waiting:
        need = max((score for score in (worth(found, top), known) if score is not None), default=None)
        beaten = [candidate for candidate in waiting if need is not None and candidate.ceiling <= need]
        found += [_by_bound(inquiry, candidate, keep=keep) for candidate in beaten]
        waiting = waiting[: len(waiting) - len(beaten)]  # the lowest bounds are last
        batch, waiting = waiting[:size], waiting[size:]
        results = inquiry.ask(batch, need, keep=keep)
        found += results
        failing = [result for result in results if result.status == "infeasible" and REPLICAS in result.choice]
        for candidate in [one for one in waiting if any(_is_smaller(one.job.choice, result.choice) for result in failing)]:
            waiting.remove(candidate)
            found.append(_by_replicas(inquiry, candidate, keep=keep))
        size = min(2 * size, inquiry.search.round)
    return found


def halving(inquiry: Inquiry, choices: Sequence[Choice]) -> list[Result]:
    """As `exhaustive`, of those that are among the better part on a short sample. Needs a rate to search for."""
    top = inquiry.search.top
    left = list(choices)
    for share in SHARES[:-1] if inquiry.search.steady else ():
        candidates = inquiry.survey(left, share)
        kept = max(4 * top, -(-len(candidates) // PART))
        found = exhaustive(inquiry, candidates, kept, keep=False)
        better = {result.number for result in ranked(found)[:kept]}
        for result in found:
            if result.number not in better:
                inquiry.keep(result)
        left = [candidate.job.choice for candidate in candidates if candidate.job.number in better] or left
    return exhaustive(inquiry, inquiry.survey(left), top)


def _by_bound(inquiry: Inquiry, candidate: Candidate, *, keep: bool) -> Result:
    result = Result(
        number=candidate.job.number, choice=candidate.job.choice, status="outbid",
        reason="cannot beat the best: its bound is lower", score_at_most=candidate.ceiling,
    )  # fmt: skip
    if keep:
        inquiry.keep(result)
    return result


def _by_replicas(inquiry: Inquiry, candidate: Candidate, *, keep: bool) -> Result:
    result = Result(
        number=candidate.job.number, choice=candidate.job.choice, status="infeasible",
        reason="more replicas of the same kind are too few already",
    )  # fmt: skip
    if keep:
        inquiry.keep(result)
    return result


def _is_smaller(choice: Choice, other: Choice) -> bool:
    """Whether it is the same with fewer replicas."""
    fewer, more = choice.get(REPLICAS), other.get(REPLICAS)
    if not (isinstance(fewer, int) and isinstance(more, int) and fewer < more):
        return False
    return all(choice.get(key) == other.get(key) for key in choice.keys() | other.keys() if key != REPLICAS)
