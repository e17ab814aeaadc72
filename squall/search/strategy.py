"""In which order configurations are looked into, and which are not worth it.

Exhaustive: those first that look best on a short sample, then from the highest bound down. Whose bound does not reach the best
found so far is done with, without any simulation; whoever fails at the rate that would make it better is done with after one,
which ends as soon as that is certain. What the short sample says only decides who comes first. Halving goes by it, too, and takes
the better part along. Both find what trying everything would find, as far as more load never helps; halving also trusts that a
short sample ranks the best among the better part. Knows no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from squall.search.inquiry import Candidate, Inquiry
from squall.search.result import Result
from squall.search.space import Choice

SCOUTED = 0.125
"""Of the sample, on which it is looked who may be the best."""

LEADS = 0.1
"""Of the highest bound; whoever does not reach that much leads nobody, and its capacity is of no interest yet."""

SCOUTS = 2048
"""Configurations that are looked at so, from all over the bounds."""

WORTH_SCOUTING = 4
"""So many times as many candidates as are to be measured: with fewer, scouting takes longer than it saves."""

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
    inquiry: Inquiry, candidates: Sequence[Candidate], top: int, *, keep: bool = True, known: float | None = None,
    leaders: Sequence[Candidate] = (),
) -> list[Result]:  # fmt: skip
    """Every candidate's result, the best `top` measured to the end, if they are better than what is `known` already.

    `leaders` are looked into first.
    """
    waiting = sorted(candidates, key=lambda candidate: (-candidate.ceiling, candidate.job.number))
    found: list[Result] = []
    size = min(top, inquiry.search.round)  # more when nothing better comes: before, most are looked into in vain
    first = {candidate.job.number for candidate in leaders}
    if first:
        waiting = [candidate for candidate in waiting if candidate.job.number not in first]
        found += inquiry.ask(leaders, known, keep=keep)
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
        if need is not None and worth(found, top) == need:
            size = min(2 * size, inquiry.search.round)
    return found


def scouted(inquiry: Inquiry, candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    """The `top` of some candidates that do best on a short sample, told where their capacity may be. None of few, or without a
    rate to search for."""
    if not inquiry.search.steady or len(candidates) < WORTH_SCOUTING * top:
        return []
    ordered = sorted(candidates, key=lambda candidate: (-candidate.ceiling, candidate.job.number))
    spread = ordered[:: -(-len(ordered) // SCOUTS)]
    short = inquiry.survey([candidate.job.choice for candidate in spread], SCOUTED)
    hopeless = LEADS * max(candidate.ceiling for candidate in short)
    ceilings = {candidate.job.number: candidate.ceiling for candidate in candidates}
    found = ranked(exhaustive(inquiry, short, top, keep=False, known=hopeless))
    best = sorted(found, key=lambda result: (-(result.score or 0.0), -ceilings[result.number], result.number))[:top]
    near = {result.number: result.capacity_rps for result in best}
    return [
        replace(candidate, job=replace(candidate.job, near_rps=near[candidate.job.number]))
        for candidate in candidates
        if candidate.job.number in near
    ]


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
    return thorough(inquiry, left)


def thorough(inquiry: Inquiry, choices: Sequence[Choice]) -> list[Result]:
    """`exhaustive`, scouted."""
    candidates = inquiry.survey(choices)
    top = inquiry.search.top
    return exhaustive(inquiry, candidates, top, leaders=scouted(inquiry, candidates, top))


def _by_bound(inquiry: Inquiry, candidate: Candidate, *, keep: bool) -> Result:
    result = candidate.rejected("outbid", "cannot beat the best: its bound is lower", candidate.ceiling)
    if keep:
        inquiry.keep(result)
    return result


def _by_replicas(inquiry: Inquiry, candidate: Candidate, *, keep: bool) -> Result:
    result = candidate.rejected("infeasible", "more replicas of the same kind are too few already")
    if keep:
        inquiry.keep(result)
    return result


def _is_smaller(choice: Choice, other: Choice) -> bool:
    """Whether it is the same with fewer replicas."""
    fewer, more = choice.get(REPLICAS), other.get(REPLICAS)
    if not (isinstance(fewer, int) and isinstance(more, int) and fewer < more):
        return False
    return all(choice.get(key) == other.get(key) for key in choice.keys() | other.keys() if key != REPLICAS)
