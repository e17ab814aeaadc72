"""What a search leaves behind: a directory with its answers, written beside its place and then renamed.

    search.toml      the question; `squall search` of it asks again
    answers.json     every result with its quantile curves, and the best measured again: what `squall search DIRECTORY` reads
    results.parquet  one row a configuration
    best.toml        the best configuration, with the workload at its capacity: for `squall simulate` and `squall serve`
    best.csv         the requests of that, where they are a part of a longer workload
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
from msgspec.structs import replace

from squall.config import Config, dumps, from_tree
from squall.core.types import SECOND
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
from squall.workload.spec import TraceWorkload, Workload

ANSWERS, QUESTION, BEST, PART, FLAGS, RESULTS, REPORT = (
    "answers.json", "search.toml", "best.toml", "best.csv", "best.txt", "results.parquet", "report.html",
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
        config = best_config(answers.tree, result, sample)
        files[BEST] = dumps(config).encode()
        files[FLAGS] = "\n".join(flag_lines(config)).encode() + b"\n"
        if sample is not None and result.capacity_rps is not None and _is_cut_out(sample):
            files[PART] = _as_trace(sample, result.capacity_rps)
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


def best_config(tree: Mapping[str, Any], result: Result, sample: Sample | None) -> Config:
    """The configuration of a result, as it was tried: its workload at its capacity, at the price that counted."""
    config = at_capacity(from_tree("best configuration", with_choice(tree, result.choice)), sample, result.capacity_rps)
    return replace(config, cluster=replace(config.cluster, usd_per_gpu_hour=result.usd_per_gpu_hour))


def at_capacity(config: Config, sample: Sample | None, rate_rps: float | None) -> Config:
    """The configuration with its workload at that rate: the requests of the sample, where its workload alone does not give them;
    else as far as its arrivals have one number for it."""
    workload = config.workload
    if rate_rps is None or sample is None or not sample.rate_rps or workload is None:
        return config
    if _is_cut_out(sample):
        return replace(config, workload=TraceWorkload(path=PART))
    times = rate_rps / sample.rate_rps
    workload = _only(longer(workload, len(sample.requests)), sample)
    arrivals = getattr(workload, "arrivals", None)
    if arrivals is not None and hasattr(arrivals, "rate_rps") and not hasattr(arrivals, "burst_rps"):
        workload = replace(workload, arrivals=replace(arrivals, rate_rps=arrivals.rate_rps * times))
    elif arrivals is None and hasattr(workload, "rate_scale"):
        workload = replace(workload, rate_scale=workload.rate_scale * times)
    return replace(config, workload=workload)


def _is_cut_out(sample: Sample) -> bool:
    """Whether its lengths are from all over a longer workload, which says nothing of them any more."""
    return not sample.whole and sample.is_plain


def _only(workload: Workload, sample: Sample) -> Workload:
    """The workload with the requests of a sample that are its first ones."""
    if sample.whole:
        return workload
    name = "max_requests" if isinstance(workload, TraceWorkload) else "num_requests"
    return replace(workload, **{name: len(sample.requests)}) if hasattr(workload, name) else workload


def _as_trace(sample: Sample, rate_rps: float) -> bytes:
    """The requests at that rate, as a trace of our own format. Times have nine digits: none is lost."""
    rows = [
        f"{one.arrived_at // SECOND}.{one.arrived_at % SECOND:09},{one.num_prompt_tokens},{one.num_output_tokens}"
        for one in sample.at(rate_rps)
    ]
    return "\n".join(["arrived_at_s,num_prompt_tokens,num_output_tokens", *rows, ""]).encode()


def _without_none(table: Any) -> Any:
    """TOML has no null: what is not set is left out."""
    if isinstance(table, Mapping):
        return {name: _without_none(value) for name, value in table.items() if value is not None}
    return table
