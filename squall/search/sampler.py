"""A strategy for spaces too large to write out: optuna's tree-structured Parzen estimator proposes, and we answer.

What it proposes is answered exactly if it may be among the best, and with the bound that rejected it otherwise. In the end
every neighbour of the best, one key away, is looked into until none is better, which is cheap because most are rejected by
their bounds. Needs the extra `search`. Knows no simulation.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from squall.errors import ConfigError
from squall.extras import install
from squall.search.inquiry import Candidate, Inquiry
from squall.search.result import Result
from squall.search.space import Choice, Dimension, alternatives, excluded
from squall.search.strategy import exhaustive, ranked, worth

UNKNOWN = -1e12
"""What an impossible configuration scores, for the sampler's eyes."""


def sampled(inquiry: Inquiry, space: Sequence[Dimension], seed: int) -> list[Result]:
    """The results of `search.trials` proposals and of the neighbours of the best.

    Raises:
        ConfigError: optuna is not installed, or nothing that was proposed can be run.
    """
    optuna = _optuna()
    search = inquiry.search
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    found: dict[int, Result] = {}
    trials = 0
    while trials < search.trials:
        asked = [study.ask() for _ in range(min(search.round, search.trials - trials))]
        trials += len(asked)
        proposals = [_proposal(trial, space, inquiry.tree) for trial in asked]
        _answer(inquiry, proposals, found)
        for trial, choice in zip(asked, proposals, strict=True):
            result = found.get(inquiry.number(choice))
            score = None if result is None else result.score if result.score is not None else result.score_at_most
            study.tell(trial, UNKNOWN if score is None or (result and result.status == "infeasible") else score)
    _polish(inquiry, space, found)
    return list(found.values())


def _polish(inquiry: Inquiry, space: Sequence[Dimension], found: dict[int, Result]) -> None:
    """Neighbours of the best few until nothing new is better."""
    looked: set[int] = set()
    while fresh := [result for result in ranked(list(found.values()))[: inquiry.search.top] if result.number not in looked]:
        looked |= {result.number for result in fresh}
        _answer(inquiry, [other for result in fresh for other in alternatives(space, result.choice, inquiry.tree)], found)


def _answer(inquiry: Inquiry, proposals: Sequence[Choice], found: dict[int, Result]) -> None:
    """Look into those that are new and not excluded."""
    fresh: dict[int, Candidate] = {}
    for choice in proposals:
        number = inquiry.number(choice)
        if number in found or number in fresh or excluded(choice, inquiry.search, inquiry.tree):
            continue
        candidate = inquiry.candidate(number, choice)
        if isinstance(candidate, Candidate):
            fresh[number] = candidate
        else:
            found[number] = candidate
            inquiry.keep(candidate)
    need = worth(list(found.values()), inquiry.search.top)
    for result in exhaustive(inquiry, list(fresh.values()), inquiry.search.top, known=need):
        found[result.number] = result


def _proposal(trial: Any, space: Sequence[Dimension], tree: Mapping[str, Any]) -> Choice:
    """What the sampler says of every key whose condition holds."""
    choice: Choice = {}
    for dimension in space:
        if dimension.applies(choice, tree):
            place = trial.suggest_categorical(dimension.key, list(range(len(dimension.values))))
            choice[dimension.key] = dimension.values[place]
    return choice


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ModuleNotFoundError:
        raise ConfigError(f'search.strategy = "sampler" needs optuna, which is not installed: {install("search")}') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
