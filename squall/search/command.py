"""The body of `squall search`: from the command's words to a search, and from its answers to lines on a terminal.

Given the directory of an earlier search in the place of a configuration, it answers other questions from that one's results and
simulates nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from squall.config import SEARCH, Config, from_tree
from squall.cores import num_cores
from squall.errors import ConfigError, SquallError
from squall.report.progress import Show, progress
from squall.report.run import place_for
from squall.search.answers import best, for_rate, repriced, summary_line, what_if
from squall.search.cluster import Cluster
from squall.search.conduct import Conductor, size_of
from squall.search.output import Answers, best_config, flag_lines, read, write
from squall.search.pool import Inline, Nobody, Processes, Workers
from squall.search.prices import named, price_of, refuse_strangers, refuse_unused, tried
from squall.search.result import Result
from squall.search.setting import Workshop
from squall.search.space import shown, usual_space, value_at
from squall.search.spec import Search, limit, read_search
from squall.search.store import Store, code_version
from squall.search.tables import best_lines, frontier_lines, miss_lines, what_if_lines
from squall.trees import merge, read_tree
from squall.workload.named import KNOWN

MOST_GPUS = 512
"""That a deployment may have where nobody says."""

STORE = Path("runs") / "search.jsonl"

Say = Callable[[str], None]


class Options(Struct, frozen=True, kw_only=True):
    """The command's words. None, and what is empty, leaves it to the configuration.

    Attributes:
        place: a configuration, or the directory of an earlier search.
        limits: as `ttft_p90_s=2`.
        prices: as `h100-sxm=2.5`, in USD an hour.
        asked: keys of `[search]` and their values.
        rate: what a fleet of copies should bear.
        workers: processes; 1 does everything in this one.
        known: nothing is simulated; the answers are those of an interrupted search that comes as far as results are known.
    """

    place: Path | None = None
    settings: tuple[str, ...] = ()
    model: str | None = None
    trace: str | None = None
    gpus: str | None = None
    limits: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()
    asked: dict[str, Any] = {}
    rate: float | None = None
    workers: int | None = None
    known: bool = False
    cluster: str | None = None
    store: Path | None = None
    out: Path | None = None


def run(options: Options, say: Say) -> Path | None:
    """Search, write the answers and tell them; returns where they are, or None where an earlier search was asked.

    Raises:
        ConfigError: the question makes no sense, or nothing can be run.
        KeyboardInterrupt: it was interrupted; what is known by then has been written and told.
    """
    if options.place is not None and options.place.is_dir():
        _again(options, read(options.place), say)
        return None
    tree, search = question(options)
    place = place_for("search", None if options.out is None else str(options.out))
    kept = options.store if options.store is not None else STORE
    with ExitStack() as stack:
        stack.enter_context(_said_once("squall.workload.build"))
        store = Store(kept)
        stack.callback(store.close)
        workers = _workers(options, search)
        stack.callback(workers.close)
        try:
            answers, sample_of = _conducted(search, tree, workers, store, say)
        except KeyboardInterrupt:
            if options.known:
                raise ConfigError(
                    f"{kept} knows nothing of this search; leave --known out, or name another file with --store"
                ) from None
            say("interrupted before anything was measured to the end: run the same command again to go on where it ended")
            raise
    place = _written(options, place, answers, sample_of(answers), kept)
    for line in told(answers, options.rate, sample_of(answers)):
        say(line)
    say(f"wrote {place}")
    if not answers.complete and options.known:
        say("that is all that is known: run the same command without --known to go on from there")
    elif not answers.complete:
        say("interrupted: run the same command again to go on where it ended")
        raise KeyboardInterrupt
    return place


def _written(options: Options, place: Path, answers: Answers, sample: Any, kept: Path) -> Path:
    """Where the answers are: at `place`, or beside it, where nobody asked for it and another search has ended there meanwhile."""
    while True:
        try:
            write(place, answers, sample)
        except SquallError as error:
            if options.out is None and place.exists():
                place = place_for("search", None)
                continue
            raise SquallError(f"{error}; results are kept in {kept}, run the same command again for the answers") from None
        return place


@contextmanager
def _said_once(name: str) -> Iterator[None]:
    """Lets every message of the logger `name` through once: a workload is drawn many times."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in said
        said.add(message)
        return new

    logger = logging.getLogger(name)
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def question(options: Options) -> tuple[dict[str, Any], Search]:
    """The configuration without its `[search]`, and that, with the command's words in both. Raises ConfigError."""
    where = str(options.place) if options.place is not None else "search"
    tree = read_tree(options.place, options.settings)
    table = dict(tree.pop(SEARCH, {}))
    table |= options.asked
    prices = {name: {"on_demand": usd} for name, usd in map(price_of, options.prices)}
    if prices:
        table["prices"] = dict(table.get("prices", {})) | prices
    search = read_search(where, table)
    if options.model is not None:
        tree.setdefault("model", {})["name"] = options.model
    if options.trace is not None:
        merge(tree, {"workload": _traced(options.trace, search)})
    for name, seconds in _pairs("--limit", options.limits):
        limit(name, seconds)
        table["slo"] = dict(table.get("slo", {})) | {name: seconds}
    gpus = [name for name in (options.gpus or "").split(",") if name]
    space = dict(search.space) or usual_space(search, gpus, tree)
    if gpus:
        space["cluster.gpu"] = gpus
    search = read_search(where, table | {"space": space})
    _make_room(tree, search)
    config = from_tree(where, tree)
    _check(config, search)
    gpus = tried(search, tree, config.cluster.gpu)
    for word in options.prices:
        refuse_unused(word, price_of(word)[0], gpus, "this search")
    refuse_strangers(f"{where}: search.prices.{{}}", search.prices, gpus)
    refuse_strangers(f"{where}: search.available.{{}}", search.available, gpus)
    return tree, search


def _make_room(tree: dict[str, Any], search: Search) -> None:
    """A configuration that does not say how many nodes there are has enough for what may be tried."""
    cluster = tree.setdefault("cluster", {})
    if isinstance(cluster, dict) and "nodes" not in cluster:
        cluster["nodes"] = -(-(search.max_gpus or MOST_GPUS) // int(cluster.get("gpus_per_node", 8)))


def _check(config: Config, search: Search) -> None:
    """What makes no sense whatever the space is."""
    if config.workload is None and not any(key.partition(".")[0] == "workload" for key in search.space):
        raise ConfigError("there is no [workload]: say what arrives, as examples/search.toml does, or use --trace")
    if not search.limits(config.slo):
        raise ConfigError("there is no objective to keep: give --ttft-p90 and --tbt-p99, or [slo]")


def _traced(trace: str, search: Search) -> dict[str, Any]:
    """The workload of a file, or a well-known one. A steady rate comes as Poisson arrivals, unless a file brings its own kind."""
    table: dict[str, Any] = (
        {"kind": "named", "name": trace} if trace in KNOWN else {"kind": "trace", "path": str(Path(trace).resolve())}
    )
    if search.steady:
        table["arrivals"] = {"kind": "poisson", "rate_rps": 1.0}
        if trace in KNOWN:
            table["num_requests"] = search.num_requests
    return table


def _pairs(option: str, words: Sequence[str]) -> Iterator[tuple[str, float]]:
    for word in words:
        name, _, number = word.partition("=")
        try:
            yield name.strip(), float(number)
        except ValueError:
            raise ConfigError(f"{option} {word}: expected NAME=NUMBER") from None


def _workers(options: Options, search: Search) -> Workers:
    if options.known:
        return Nobody()
    if options.cluster is not None:
        return Cluster(search, options.cluster)
    count = options.workers or num_cores()
    return Inline(Workshop(search)) if count == 1 else Processes(search, count)


def _conducted(
    search: Search, tree: dict[str, Any], workers: Workers, store: Store, say: Say
) -> tuple[Answers, Callable[[Answers], Any]]:
    """The answers, under a bar, and who knows the sample that the best was tried with."""
    found: dict[int, Result] = {}
    show_of: list[Show] = []

    def told(result: Result) -> None:
        found[result.number] = result
        leader = best(list(found.values()))
        note = f"{len(found):,} looked into" + (f", best so far: {shown(leader.choice)}" if leader else "")
        for show in show_of:
            show(len(found), note)

    seed = int(value_at(tree, "run.seed") or 0)
    conductor = Conductor(search, tree, workers, store, code_version(), told, seed)
    total = size_of(conductor.space, search, tree)
    if store.num_known:
        say(f"{store.num_known:,} results are known from earlier searches")
    with progress(f"searching {total:,} configurations", total) as show:
        show_of.append(show)
        answers = conductor.answers()

    def sample(answers: Answers) -> Any:
        if not answers.finalists:
            return None
        return conductor.sample(answers.finalists[0].result)

    simulated = sum(inquiry.num_simulated for inquiry in conductor.inquiries)
    steps = sum(inquiry.token_steps for inquiry in conductor.inquiries)
    say(f"{len(answers.results):,} configurations: {summary_line(answers.results)}")
    say(f"{simulated:,} of them simulated now, {steps:,} token-steps")
    return answers, sample


def told(answers: Answers, rate: float | None, sample: Any) -> Iterator[str]:
    """The answers as lines."""
    search, results = answers.search, answers.results
    yield from reasons(results)
    if not answers.finalists:
        yield from _no_answer(results)
        return
    yield ""
    yield from best_lines(answers.finalists, search)
    yield ""
    yield "nothing that was measured beats these in cost, TTFT and TBT at once:"
    yield from frontier_lines(results, search)
    yield ""
    low, high = answers.finalists[0].off
    yield from (f"if step times are off (the winner's: {low:.2f} to {high:.2f} times): {note}" for note in answers.notes)
    yield from _loss_lines(answers)
    if rate is not None:
        yield from _fleet_lines(results, rate)
    yield from flag_lines(best_config(answers.tree, answers.finalists[0].result, sample))


def reasons(results: Sequence[Result]) -> Iterator[str]:
    """Why configurations could not be run, the commonest reasons first."""
    counts: dict[str, int] = {}
    for result in results:
        if result.status in ("invalid", "failed"):
            counts[result.reason] = counts.get(result.reason, 0) + 1
    common = sorted(counts.items(), key=lambda pair: -pair[1])
    yield from (f"  {count:,} x {reason}" for reason, count in common[:5])
    if len(common) > 5:
        yield f"  and {sum(count for _, count in common[5:]):,} for {len(common) - 5} other reasons (results.parquet has them)"


def _no_answer(results: Sequence[Result]) -> Iterator[str]:
    limits = [result.binding for result in results if result.status == "infeasible" and result.binding]
    binding = max(dict.fromkeys(limits), key=limits.count) if limits else ""
    yield "no configuration keeps the limits" + (
        f"; {binding} is what breaks first in {limits.count(binding):,} of them" if binding else ""
    )
    yield "the nearest misses:"
    yield from miss_lines(results)


def _loss_lines(answers: Answers) -> Iterator[str]:
    for row, columns in answers.losses.items():
        for column, times in columns.items():
            if row != column:
                said = "breaks a limit there" if times is None else f"costs {times:.2f} times the best there"
                yield f"the best for {row}, used for {column}, {said}"


def _fleet_lines(results: Sequence[Result], rate: float) -> Iterator[str]:
    yield f"for {rate:g} req/s, from what one copy bears (the router's losses not counted):"
    for fleet in for_rate(results, rate)[:3]:
        yield f"  {fleet.usd_per_hour:.2f} USD/h: {fleet.copies} x number {fleet.result.number}: {shown(fleet.result.choice)}"


# -- an earlier search


def _again(options: Options, answers: Answers, say: Say) -> None:
    """Other prices, tighter limits, another rate."""
    search = answers.search
    if not (options.prices or options.limits or options.rate):
        for line in told(answers, None, None):
            say(line)
        return
    gpus = {result.gpu for result in answers.results if result.gpu}
    for word in options.prices:
        refuse_unused(word, price_of(word)[0], gpus, str(options.place))
    asked = dict(map(price_of, options.prices))
    prices = {gpu: usd for gpu in sorted(gpus) if (usd := named(asked, gpu, gpu)) is not None}
    limits = [limit(name, seconds) for name, seconds in _pairs("--limit", options.limits)]
    answer = what_if(answers.results, search, prices=prices, limits=limits)
    for line in what_if_lines(answer, search):
        say(line)
    if answer.open:
        say(f"to know: squall search {options.place}/search.toml {_words(options)}")
    if options.rate is not None:
        if not search.steady:
            raise ConfigError(
                "--rate: that search played one workload as it is; to know, set workload.rate_scale and run it again"
            )
        for line in _fleet_lines([repriced(result, search, prices) for result in answers.results], options.rate):
            say(line)


def _words(options: Options) -> str:
    return " ".join([*(f"--price {word}" for word in options.prices), *(f"--limit {word}" for word in options.limits)])
