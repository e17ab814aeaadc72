"""Vidur's best deployment, one step of it, operator by operator: our prices, and the tables that Vidur publishes.

Tables are medians of kernels: products, element-wise kernels and collectives for A100 and H100, attention for A100 alone. What
the CPU does for a step is not published, nor is the price of the paper's figure.
"""

import atexit
import shutil
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.vidur.question import FEW, SHARED, asked, tree
from squall.core.actions import Chunk, RunSteps
from squall.core.metrics import RunRecord
from squall.core.types import SECOND, Nanos
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Line
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import UNITS_PER_NANO, BatchShape, LatencyModel, Progression
from squall.perf.operators import Provenance
from squall.perf.tables.choose import import_profile
from squall.perf.tables.profile import save
from squall.report.sample import sample_of_gaps
from squall.search.evaluate import Trial, evaluate
from squall.search.result import Job, Result
from squall.search.setting import Setting, Workshop
from squall.search.space import with_choice
from squall.search.spec import Search

BATCHING = {"kind": "sarathi", "chunk_size": 512, "max_num_seqs": 512}
"""Vidur multiplies its batch size by the stages of the pipeline: 256 are 512 here."""

STEP = RunSteps(0, 1, 128, 128 * 900, (Chunk(0, 0, 384, 0, False),))
"""128 decodes over 900 tokens each, and 384 tokens of a prompt."""

USD = {"ours": 2.95, "Vidur's analysis": 4.25, "its Pareto script": 6.98}
"""For an hour of an H100."""

PUBLISHED = 0.2
"""Requests a second for a dollar an hour (the figure's title)."""

LAUNCHES_S = 2 * 40 * 20e-6
"""By Vidur's rules each all-reduce takes 0.02 ms more than its kernel: two in each of a stage's 40 layers."""

SEVERAL = 0.1
"""By Vidur's rules attention of several sequences takes so much more, where heads share keys and values."""


class OnEveryStage(Struct, frozen=True):
    """`latency`, and as much more on every stage."""

    latency: LatencyModel
    more: Nanos

    @property
    def source(self) -> str:
        return f"{self.latency.source} + {self.more / 1e6:g} ms a stage"

    @property
    def num_stages(self) -> int:
        return self.latency.num_stages

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`."""
        more = UNITS_PER_NANO * self.more * self.num_stages
        return [replace(part, first=part.first + more) for part in self.latency.run(shape, steps)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return tuple(nanos + self.more for nanos in self.latency.stages(shape))


def imported(gpu: str) -> dict[str, Any]:
    """A `[latency]` table with what Vidur publishes for a GPU, as `squall profile import` reads it; empty without it."""
    folder = SHARED / "vidur_profiles"
    if not folder.is_dir():
        return {}
    place = Path(tempfile.mkdtemp(prefix="squall-search-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)  # searches read it until the benchmark ends
    for file in (*folder.glob(f"{gpu}/*70*"), *folder.glob(f"{gpu}/*attention*"), *folder.glob(f"network/{gpu}_dgx_*")):
        shutil.copy(file, place)
    save(import_profile("vidur", place, resolve_gpu(gpu), resolve_model("llama-2-70b"), ""), place / "profile.parquet")
    return {"kind": "measured", "path": str(place / "profile.parquet")}


def best_job(search: Search, latency: dict[str, Any], gpu: str = "h100", tp: int = 2, pp: int = 2, chunk: int = 512) -> Job:
    """Vidur's best deployment, or one like it."""
    choice = {"cluster.gpu": gpu, "replica.tp": tp, "replica.pp": pp, "batching": BATCHING | {"chunk_size": chunk}}
    base = with_choice(tree(search, latency=latency), choice)
    return Job(0, choice, base, None, search.num_requests, search.warm_up, search.span_s)


def operators(smoke: bool) -> None:
    """A step's operators by both, then what deployments bear with what is not published taken to be so and so much."""
    search = asked(**(FEW if smoke else {}))
    workshop = Workshop(search)
    tables = {gpu: imported(gpu) for gpu in ("h100", "a100")}
    if not tables["h100"]:
        print(f"no {SHARED / 'vidur_profiles'}: Vidur's tables are needed (set SQUALL_SHARED)")
        return
    _print_operators([
        workshop.setting(best_job(search, latency, gpu)) for gpu in ("h100", "a100") for latency in ({}, tables[gpu])
    ])  # fmt: skip
    job = best_job(search, tables["h100"])
    setting = workshop.setting(job)
    _print_limits(search, asked(criterion="vidur", **(FEW if smoke else {})), job)
    print(
        "    more on every stage    req/s   QPS per dollar an hour at " + ", ".join(f"{usd} ({who})" for who, usd in USD.items())
    )
    for cpu_ms in (0, 30) if smoke else (0, 2, 10, 20, 30, 40, 60):
        result = _slowed(search, job, setting, cpu_ms / 1e3)
        rate = result.capacity_rps or 0.0
        scores = "  ".join(f"{rate / (4 * usd):.2f}" for usd in USD.values())
        print(f"    {cpu_ms:16} ms {rate:8.2f}   {scores}   beyond: {result.binding}", flush=True)
    wanted = ", ".join(f"{PUBLISHED * 4 * usd:.1f} req/s at {usd}" for usd in USD.values())
    print(f"    the published {PUBLISHED} QPS per dollar an hour is {wanted} USD")


def _print_operators(settings: Sequence[Setting]) -> None:
    """One row an operator of the first stage: H100 by us and by Vidur's tables, and A100 so."""
    rows = [[line for line in explained(setting.latency) if line.stage == 0] for setting in settings]
    print("    one step of a stage (40 layers): 128 decodes over 900 tokens, 384 tokens of a prompt; ms")
    print(f"    {'':26} {'H100: ours':>11} {'tables':>8}   {'A100: ours':>11} {'tables':>8}")
    for lines in zip(*rows, strict=True):
        ms = [
            f"{1e3 * line.seconds:.2f}" if ours or _published(line) else "-"
            for ours, line in zip((1, 0, 1, 0), lines, strict=True)
        ]
        print(f"    {lines[0].operator:26} {ms[0]:>11} {ms[1]:>8}   {ms[2]:>11} {ms[3]:>8}")
    for_each = [sums(ours, theirs) for ours, theirs in zip(rows[::2], rows[1::2], strict=True)]
    (h, their_h), (a, their_a) = for_each
    print(f"    {'all that is published':26} {h:11.2f} {their_h:8.2f}   {a:11.2f} {their_a:8.2f}")
    attention = 1e3 * sum(line.seconds for line in rows[0] if line.kind == "sequence")
    print(
        f"    beside the tables, by Vidur's rules: {1e3 * LAUNCHES_S:.1f} ms for launching all-reduces, {SEVERAL:.0%} more "
        f"attention ({SEVERAL * attention:.1f} ms),\n    no embedding, head or sampling (ours: {_head(settings[0].latency):.1f} "
        "ms on the last stage), CPU work on every stage (ours: 0.6 ms on the first)"
    )


def _published(line: Line) -> bool:
    """Whether a table knows it, and not only the datasheet."""
    return line.provenance is not Provenance.ROOFLINE


def explained(latency: LatencyModel) -> list[Line]:
    """The step's operators, of all stages."""
    explain: list[Line] = getattr(latency, "explain")(STEP)  # noqa: B009 - of those that are put together from operators
    return explain


def sums(ours: Sequence[Line], theirs: Sequence[Line]) -> tuple[float, float]:
    """Milliseconds by both of what tables know."""
    known = [pair for pair in zip(ours, theirs, strict=True) if _published(pair[1])]
    return 1e3 * sum(own.seconds for own, _ in known), 1e3 * sum(other.seconds for _, other in known)


def _head(latency: LatencyModel) -> float:
    names = ("head", "sampling", "final norm", "all-gather of logits")
    return 1e3 * sum(line.seconds for line in explained(latency) if line.operator in names)


def _print_limits(search: Search, vidurs: Search, job: Job) -> None:
    """What the two definitions of the limits see at capacity: ours, Vidur's time in the queue, and its time of batches."""
    workshop = Workshop(search)
    capacity = evaluate(workshop, job)
    assert capacity.capacity_rps is not None
    assert capacity.curves is not None
    _, record = Trial(search, job, workshop.setting(job)).play(capacity.capacity_rps, early=False)
    assert record is not None
    said = ", ".join(
        f"{metric} P{100 * quantile:.0f} {capacity.curves.at(metric, quantile):.2f} s"
        for metric, quantile in (("ttft", 0.9), ("tbt", 0.99), ("queue", 0.99))
    )
    queue = evaluate(Workshop(vidurs), job)
    print(
        f"    at its capacity of {capacity.capacity_rps:.2f} req/s with the tables: {said}; P99 of batches' times "
        f"{_batches_p99(record):.2f} s;\n    the queue alone (P99 within 5 s) lets {queue.capacity_rps or 0:.2f} req/s pass"
    )


def _batches_p99(record: RunRecord) -> float:
    """Vidur's time between tokens: each batch counts once, however many requests it has."""
    once = replace(record.gaps, weight=array("q", [1]) * len(record.gaps.weight))
    return float(sample_of_gaps(once).at([0.99])[0]) / SECOND


def _slowed(search: Search, job: Job, setting: Setting, seconds: float) -> Result:
    return Trial(search, job, replace(setting, latency=OnEveryStage(setting.latency, round(seconds * SECOND)))).capacity()
