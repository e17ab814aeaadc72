"""A search under way: looks configurations up, has the others worked out, and remembers everything.

Rounds make it independent of how many workers there are: what the best so far is, is looked at between rounds only, and
a round's configurations are chosen before it begins. Knows no strategy; `strategy` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.search.pool import Workers
from squall.search.result import Job, Result, Status
from squall.search.setting import Workshop
from squall.search.space import Choice, with_choice
from squall.search.spec import Search
from squall.search.store import Store, key_of


class Candidate(Struct, frozen=True):
    """A configuration that can be run: its job, its key in the store, what its score cannot exceed, and what it runs on."""

    job: Job
    key: str
    ceiling: float
    gpu: str = ""
    num_gpus: float = 0
    usd_per_gpu_hour: float = 0.0
    watts: float = 0.0

    def rejected(self, status: Status, reason: str, score_at_most: float | None = None) -> Result:
        """Its result where no simulation is needed."""
        return Result(
            number=self.job.number, choice=self.job.choice, status=status, reason=reason, score_at_most=score_at_most,
            gpu=self.gpu, num_gpus=self.num_gpus, usd_per_gpu_hour=self.usd_per_gpu_hour, watts=self.watts,
        )  # fmt: skip


Told = Callable[[Result], None]
"""Called with every result."""


class Inquiry:
    """What is asked and what is known.

    Args:
        search: the question.
        tree: the configuration that choices are made in.
        workshop, workers, store: who looks, who works, and what was known before.
        told: see Told.

    Attributes:
        results: by number: the latest of each configuration, with the whole sample.
        num_simulated: results that were worked out and not looked up.
        num_runs, token_steps: simulations that these took, and how much was simulated.
        played_gpu_hours, played_usd: what they would have taken on the GPUs themselves.
    """

    def __init__(
        self, search: Search, tree: dict[str, Any], workshop: Workshop, workers: Workers, store: Store, code: str,
        told: Told = lambda _: None,
    ) -> None:  # fmt: skip
        self.search = search
        self.tree = tree
        self.results: dict[int, Result] = {}
        self.num_simulated = 0
        self.num_runs = 0
        self.token_steps = 0
        self.played_gpu_hours = self.played_usd = 0.0
        self._workshop = workshop
        self._workers = workers
        self._store = store
        self._code = code
        self._told = told
        self._numbers: dict[str, int] = {}

    def number(self, choice: Choice) -> int:
        """The same for the same choice, from 0 in the order in which they are first asked for."""
        return self._numbers.setdefault(repr(sorted(choice.items())), len(self._numbers))

    def survey(self, choices: Iterable[Choice], share: float = 1.0) -> list[Candidate]:
        """Those that can be run, on that share of the sample. Why the others cannot is kept as their result.

        Raises:
            ConfigError: a key of the space exists in no combination, or there is no combination.
        """
        candidates: list[Candidate] = []
        refused: list[Result] = []
        for choice in choices:
            number = self.number(choice)
            found = self.candidate(number, choice, share)
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                refused.append(found)
        if not candidates:
            raise ConfigError(_nothing(refused))
        _refuse_unknown_keys(candidates, refused)
        for result in refused:
            self.keep(result)
        return candidates

    def candidate(self, number: int, choice: Choice, share: float = 1.0, **more: Any) -> Candidate | Result:
        """One configuration, or why it cannot be run. `more`: further fields of its job."""
        steady = self.search.steady
        count = max(2, round(self.search.num_requests * share)) if steady else 0
        warm_up = min(round(self.search.warm_up * share), count - 1) if steady else 0
        span_s = self.search.span_s * share if steady else 0.0
        tree = with_choice(self.tree, choice)
        job = Job(number, choice, tree, num_requests=count, warm_up=warm_up, span_s=span_s, **more)
        try:
            setting = self._workshop.setting(job)
        except ConfigError as error:
            return Result(number=number, choice=choice, status="invalid", reason=str(error))
        key, ceiling = key_of(self.search, job, setting, self._code), setting.score_at_most(self.search)
        gpu = setting.gpu
        return Candidate(job, key, ceiling, gpu.name, setting.most_gpus, setting.usd_per_gpu_hour, gpu.power_w)

    def ask(self, candidates: Sequence[Candidate], need: float | None, *, keep: bool = True) -> list[Result]:
        """What there is to know about each, in their order: from the store, or worked out now."""
        found: dict[int, Result] = {}
        unknown: dict[int, Candidate] = {}
        for candidate in candidates:
            job = _needing(candidate.job, need)
            known = self._store.find(candidate.key, job)
            if known is not None:
                found[job.number] = self._take(known, keep=keep)
            else:
                unknown[job.number] = candidate
        for result in self._workers.run([_needing(candidate.job, need) for candidate in unknown.values()]):
            candidate = unknown[result.number]
            self._count(result)
            self._store.add(candidate.key, _needing(candidate.job, need), result)
            found[result.number] = self._take(result, keep=keep)
        return [found[candidate.job.number] for candidate in candidates]

    def _count(self, result: Result) -> None:
        self.num_simulated += 1
        self.num_runs += result.probes
        self.token_steps += result.token_steps
        self.played_gpu_hours += result.played_gpu_hours
        self.played_usd += result.played_gpu_hours * result.usd_per_gpu_hour

    def keep(self, result: Result) -> None:
        """What was found out without working."""
        self._take(result, keep=True)

    def _take(self, result: Result, *, keep: bool) -> Result:
        if keep:
            self.results[result.number] = result
            self._told(result)
        return result


def _needing(job: Job, need: float | None) -> Job:
    return replace(job, need=need)


def _nothing(refused: Sequence[Result]) -> str:
    """One line for a space of which nothing can be run: the commonest reason."""
    if not refused:
        return "search.space: search.exclude leaves no combination; take a rule out"
    reasons = [result.reason for result in refused]
    commonest = max(dict.fromkeys(reasons), key=reasons.count)
    return f"none of the {len(refused):,} configurations can be run; {reasons.count(commonest):,} of them: {commonest}"


def _refuse_unknown_keys(candidates: Sequence[Candidate], refused: Sequence[Result]) -> None:
    """A key that no combination knows is a mistake and no reason to prune."""
    good = {key for candidate in candidates for key in candidate.job.choice}
    for result in refused:
        for key in result.choice:
            if key not in good and f"no key {key.rpartition('.')[2]!r}" in result.reason:
                raise ConfigError(f"search.space: {key}: {result.reason.partition(': ')[2]}")
