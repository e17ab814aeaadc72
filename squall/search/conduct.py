"""A whole search: the space, the strategy, the best measured again, and what other workloads make of it.

Knows which part does what, and how a search ends early: what was found by then is an answer, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from squall.errors import ConfigError
from squall.search.answers import Finalist, losses, order, robustness
from squall.search.inquiry import Candidate, Inquiry, Told
from squall.search.output import Answers
from squall.search.pool import Workers
from squall.search.result import Result
from squall.search.sample import Sample
from squall.search.sampler import sampled
from squall.search.setting import Workshop
from squall.search.space import Dimension, choices, dimensions
from squall.search.spec import Search
from squall.search.store import Store
from squall.search.strategy import halving, ranked, thorough

MISSES = 16
"""Configurations that are simulated to the end although they break a limit, where all do."""

OWN = "workload"
"""What the configuration's own workload is called beside `[search.workloads]`."""


class Conductor:
    """Asks the same question of one workload after the other.

    Args:
        search: the question.
        tree: the configuration, without the `[search]` table.
        workers, store, code: see `inquiry.Inquiry`.
        told: called with every result of the configuration's own workload.
        seed: of a sampler.
    """

    def __init__(
        self, search: Search, tree: dict[str, Any], workers: Workers, store: Store, code: str, told: Told, seed: int = 0
    ) -> None:
        self._search = search
        self._tree = tree
        self._workers = workers
        self._store = store
        self._code = code
        self._told = told
        self._seed = seed
        self.workshop = Workshop(search)
        self.space = dimensions(search.space)
        self.inquiries: list[Inquiry] = []

    def answers(self) -> Answers:
        """Everything that is asked. Interrupted, what is known by then.

        Raises:
            ConfigError: nothing can be run.
            SquallError: results cannot be kept.
        """
        inquiry = self._inquiry(self._tree, self._told)
        finalists: list[Finalist] = []
        notes: list[str] = []
        crossed: dict[str, dict[str, float | None]] = {}
        complete = False
        try:
            self._look(inquiry)
            finalists = self._finalists(inquiry)
            if not finalists and not self._search.steady:
                self._miss(inquiry)
            notes = robustness(finalists)
            crossed = self._crossed(inquiry) if self._search.workloads else {}
            complete = True
        except KeyboardInterrupt:
            if not inquiry.results:
                raise
        if not finalists:
            finalists = [Finalist(result) for result in self._best(inquiry)]
        results = [inquiry.results[number] for number in sorted(inquiry.results)]
        return Answers(self._search, self._tree, results, finalists, notes, crossed, complete)

    def sample(self, result: Result) -> Sample | None:
        """What a result was found with."""
        found = self.inquiries[0].candidate(result.number, result.choice)
        return self.workshop.setting(found.job).sample if isinstance(found, Candidate) else None

    def _inquiry(self, tree: dict[str, Any], told: Told) -> Inquiry:
        inquiry = Inquiry(self._search, tree, self.workshop, self._workers, self._store, self._code, told)
        self.inquiries.append(inquiry)
        return inquiry

    def _look(self, inquiry: Inquiry) -> None:
        """The strategy's results go to the inquiry as they come."""
        if self._search.strategy == "sampler":
            sampled(inquiry, self.space, self._seed)
            if not any(result.status != "invalid" for result in inquiry.results.values()):
                raise ConfigError(f"nothing that was tried can be run: {next(iter(inquiry.results.values())).reason}")
            return
        combinations = list(choices(self.space, self._search, inquiry.tree))
        if self._search.strategy == "halving":
            halving(inquiry, combinations)
        else:
            thorough(inquiry, combinations)

    def _best(self, inquiry: Inquiry) -> list[Result]:
        return ranked(list(inquiry.results.values()))[: self._search.top]

    def _finalists(self, inquiry: Inquiry) -> list[Finalist]:
        """The best, measured with other seeds and with step times that are off."""
        best = self._best(inquiry)
        if not self._search.steady:
            return [Finalist(result) for result in best]
        off = [self._off(inquiry, result) for result in best]
        others = [self._again(inquiry, best, [{"seed": seed}] * len(best)) for seed in range(1, self._search.seeds)]
        slower = self._again(inquiry, best, [{"factor": high} for _, high in off])
        faster = self._again(inquiry, best, [{"factor": low} for low, _ in off])
        return order([
            Finalist(result, (result.capacity_rps, *(rates[place] for rates in others)), slower[place], faster[place], off[place])
            for place, result in enumerate(best)
        ])  # fmt: skip

    def _off(self, inquiry: Inquiry, result: Result) -> tuple[float, float]:
        """By how much its step times may be too long and too short."""
        found = inquiry.candidate(result.number, result.choice)
        return self.workshop.setting(found.job).uncertainty(self._search) if isinstance(found, Candidate) else (1.0, 1.0)

    def _miss(self, inquiry: Inquiry) -> None:
        """Nothing keeps the limits: how near some came, those with the most GPUs first, is worth whole simulations."""
        broken = [result for result in inquiry.results.values() if result.status == "infeasible" and result.binding]
        largest = sorted(broken, key=lambda result: (-result.num_gpus, result.number))[:MISSES]
        found = [inquiry.candidate(result.number, result.choice, thorough=True) for result in largest]
        inquiry.ask([candidate for candidate in found if isinstance(candidate, Candidate)], None)

    def _again(self, inquiry: Inquiry, best: list[Result], changed: list[dict[str, Any]]) -> list[float | None]:
        """The capacities of these under other circumstances: fields of each one's job."""
        found = [
            inquiry.candidate(result.number, result.choice, near_rps=(result.capacity_rps or 0) / more.get("factor", 1.0), **more)
            for result, more in zip(best, changed, strict=True)
        ]
        candidates = [candidate for candidate in found if isinstance(candidate, Candidate)]
        rates = {result.number: result.capacity_rps for result in inquiry.ask(candidates, None, keep=False)}
        return [rates.get(result.number) for result in best]

    # -- other workloads

    def _crossed(self, own: Inquiry) -> dict[str, dict[str, float | None]]:
        """What the best for each workload costs under each other."""
        inquiries = {OWN: own}
        for name, workload in self._search.workloads.items():
            inquiries[name] = self._inquiry(self._tree | {"workload": workload}, lambda _: None)
            self._look(inquiries[name])
        winners = {name: self._best(inquiry)[:1] for name, inquiry in inquiries.items()}
        scores: dict[str, dict[str, float | None]] = {name: {} for name in inquiries}
        for row, winner in winners.items():
            for column, inquiry in inquiries.items():
                scores[row][column] = self._score(inquiry, winner[0]) if winner else None
        return losses(scores)

    def _score(self, inquiry: Inquiry, winner: Result) -> float | None:
        """Of the winner of one workload under another."""
        candidate = inquiry.candidate(inquiry.number(winner.choice), winner.choice)
        if not isinstance(candidate, Candidate):
            return None
        return inquiry.ask([candidate], None, keep=False)[0].score


Show = Callable[[float, str], None]


def size_of(space: list[Dimension], search: Search, tree: dict[str, Any]) -> int:
    """How many configurations there are to look into."""
    return search.trials if search.strategy == "sampler" else sum(1 for _ in choices(space, search, tree))
