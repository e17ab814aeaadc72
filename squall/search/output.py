"""What a search leaves behind: a directory with its answers, written beside its place and then renamed.

    search.toml      the question; `squall search` of it asks again
    answers.json     every result with its quantile curves, and the best measured again: what `squall search DIRECTORY` reads
    results.parquet  one row a configuration
    best.toml        the best configuration, with the workload at its capacity: for `squall simulate` and `squall serve`
    best.txt         the same as commands for vLLM and SGLang
    report.html      plots, without a network

Knows how results are written and not how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from msgspec import Struct

from squall.config import Config, dumps, from_tree
from squall.errors import ConfigError, SquallError
from squall.files import write_directory
from squall.search import flags
from squall.search.answers import Finalist
from squall.search.page import page
from squall.search.result import Result
from squall.search.sample import Sample, longer
from squall.search.space import with_choice
from squall.search.spec import Search
from squall.search.tables import parquet

ANSWERS, QUESTION, BEST, FLAGS, RESULTS, REPORT = (
    "answers.json", "search.toml", "best.toml", "best.txt", "results.parquet", "report.html",
)  # fmt: skip


class Answers(Struct, frozen=True):
    """What `answers.json` holds.

    Attributes:
        search: the question, and `tree` the configuration that it was asked of.
        results: of all configurations, by number.
        finalists: the best, in their order, measured again.
        notes: what to know about them, a line each.
        losses: by workload (row) whose best is used under another (column): how many times as dear.
        complete: False where the search was interrupted.
    """

    search: Search
    tree: dict[str, Any]
    results: list[Result]
    finalists: list[Finalist]
    notes: list[str] = []
    losses: dict[str, dict[str, float | None]] = {}
    complete: bool = True


def write(path: Path, answers: Answers, sample: Sample | None) -> None:
    """Write the directory at `path`, which must not exist. `sample`: what the best was tried with.

    Raises:
        SquallError: `path` exists, or the disk is full or not writable; nothing is left behind then.
    """
    question = answers.tree | {"search": _without_none(msgspec.to_builtins(answers.search))}
    files = {
        QUESTION: tomli_w.dumps(question).encode(),
        ANSWERS: msgspec.json.encode(answers),
        RESULTS: parquet(answers.results, answers.search),
        REPORT: page(path.name, answers.search, answers.results, answers.finalists, answers.notes, answers.losses).encode(),
    }
    if answers.finalists:
        result = answers.finalists[0].result
        config = at_capacity(
            from_tree("best configuration", with_choice(answers.tree, result.choice)), sample, result.capacity_rps
        )
        files[BEST] = dumps(config).encode()
        files[FLAGS] = "\n".join(flag_lines(config)).encode() + b"\n"
    try:
        write_directory(path, files)
    except OSError as error:
        raise SquallError(f"cannot write {path}: {error.strerror or error}") from None


def read(path: Path) -> Answers:
    """The answers in the directory of an earlier search. Raises ConfigError where it is none."""
    try:
        return msgspec.json.decode((path / ANSWERS).read_bytes(), type=Answers)
    except FileNotFoundError:
        raise ConfigError(f"{path} holds no search: it has no {ANSWERS}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path / ANSWERS} cannot be read: {error}") from None


def flag_lines(config: Config) -> list[str]:
    """The configuration as commands for other engines, with what they do not say."""
    return [f"# vLLM\n{flags.vllm(config)}", f"# SGLang\n{flags.sglang(config)}", *(f"# {line}" for line in flags.doubts(config))]


def at_capacity(config: Config, sample: Sample | None, rate_rps: float | None) -> Config:
    """The configuration with its workload at that rate, as far as its arrivals have one number for it."""
    workload = config.workload
    if rate_rps is None or sample is None or not sample.rate_rps or workload is None:
        return config
    times = rate_rps / sample.rate_rps
    workload = longer(workload, len(sample.requests))
    arrivals = getattr(workload, "arrivals", None)
    if arrivals is not None and hasattr(arrivals, "rate_rps") and not hasattr(arrivals, "burst_rps"):
        faster = msgspec.structs.replace(arrivals, rate_rps=arrivals.rate_rps * times)
        workload = msgspec.structs.replace(workload, arrivals=faster)
    elif arrivals is None and hasattr(workload, "rate_scale"):
        workload = msgspec.structs.replace(workload, rate_scale=workload.rate_scale * times)
    return msgspec.structs.replace(config, workload=workload)


def _without_none(table: Any) -> Any:
    """TOML has no null: what is not set is left out."""
    if isinstance(table, Mapping):
        return {name: _without_none(value) for name, value in table.items() if value is not None}
    return table
