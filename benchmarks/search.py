"""How fast and how exact `squall search` is.

    python benchmarks/search.py [--smoke] [--workers N] [--only TEXT] [--sample N] [--skip N] [--span S] [--store FILE]
        [ROW ...]

Rows, and their targets on two cores: `space`, 1,000 configurations of Llama-2-70B and Qwen-72B under five minutes; `grid`,
capacities within 2 % of a fine grid on 50 random configurations; `workers`, the same answer whatever the number of workers;
`share`, at most 15 % of the token-steps that trying everything takes, and the same best; `strategies`, the same best by each of
them; `paper`, Vidur's best configuration for LLaMA2-70B on conversation lengths (TP 2 x PP 2 on H100, Sarathi, chunk 512, batch
256) in our top three, or why not; `operators`, one step of that, operator by operator, by us and by Vidur's published tables,
and what it bears with more of what is not published; `gap`, why Qwen-72B costs so much more than Llama-2-70B; `study`, the
what-if study of the Vidur paper, four models under three workloads on two GPUs, 35,565 runs in 30 minutes; `scaling`, an
autoscaled search over the Azure code hour, 200 configurations in ten minutes.

`--sample` takes so many configurations in `grid`, `share` and `scaling`, `--only qwen` the models (or pairs with workloads) that
are called so in `space` and `study`. With `--store`, `space`, `share`, `study` and `scaling` go on where they were ended, and say
at once what they know (times are then those of the rest); `grid` goes on with `--skip`: how many configurations it printed.
`--span 25` takes samples of 25 s instead of 100 s, in `grid`, `share` and `strategies`: more is chance, and it takes less long.

Lengths are those of the workloads chat-lmsys-1m, arxiv-4k and bwb-4k: generated, by the Vidur paper's statistics. Times are wall
seconds, and CPU seconds of all processes; other work on the machine shows in the former, and a little in the latter.
"""

import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the paper's question is a package beside this file

from benchmarks.vidur.best import gap, paper  # noqa: E402
from benchmarks.vidur.operators import operators  # noqa: E402
from benchmarks.vidur.question import FEW, MODELS, SHARED, WORKLOADS, asked, paper_space, tree, word  # noqa: E402
from squall.errors import ConfigError  # noqa: E402
from squall.search.answers import summary_line  # noqa: E402
from squall.search.capacity import place_below, rate_at  # noqa: E402
from squall.search.command import reasons  # noqa: E402
from squall.search.conduct import Conductor  # noqa: E402
from squall.search.evaluate import Trial, evaluate  # noqa: E402
from squall.search.inquiry import Candidate, Inquiry  # noqa: E402
from squall.search.output import Answers  # noqa: E402
from squall.search.pool import Inline, Processes, Workers  # noqa: E402
from squall.search.result import Job  # noqa: E402
from squall.search.setting import Workshop  # noqa: E402
from squall.search.space import choices, dimensions, shown  # noqa: E402
from squall.search.spec import Search  # noqa: E402
from squall.search.store import Store, code_version  # noqa: E402
from squall.search.strategy import ranked, thorough  # noqa: E402


def sized(smoke: bool) -> dict[str, Any]:
    """How long samples are: as a search has them, or as `--span` says."""
    span = float(word("--span") or 100)
    return FEW if smoke else {"num_requests": round(8 * span), "warm_up": round(0.8 * span), "span_s": span}


def workers_for(search: Search, count: int) -> Workers:
    return Inline(Workshop(search)) if count == 1 else Processes(search, count)


def store() -> Store:
    """What is known already, by `--store`."""
    return Store(Path(word("--store")) if word("--store") else None)


def searched(search: Search, base: dict[str, Any], count: int) -> tuple[Answers, Conductor, float, float]:
    """The answers, who found them, wall seconds and CPU seconds."""
    workers = workers_for(search, count)
    began, spent = time.perf_counter(), sum(os.times()[:4])
    known = store()
    if known.num_known:
        print(f"    {known.num_known:,} results are known: times are those of the rest")
    conductor = Conductor(search, base, workers, known, code_version(), lambda _: None)
    try:
        answers = conductor.answers()
    finally:
        workers.close()
        known.close()
    return answers, conductor, time.perf_counter() - began, sum(os.times()[:4]) - spent


def space(smoke: bool, count: int) -> None:
    """All configurations of two models."""
    models = ["llama-2-70b"] if smoke else ["llama-2-70b", "qwen-72b"]
    narrowed: dict[str, Any] = {}
    if smoke:
        narrowed = {"replica.pp": [1, 2], "replica.tp": [2, 4], "batching.kind": ["vllm"], "batching.max_num_seqs": [128]}
    total, seconds = 0, 0.0
    for model in [model for model in models if word("--only") in model]:
        search = asked(space=paper_space() | narrowed, top=3, **(FEW | {"seeds": 1} if smoke else {}))
        answers, conductor, wall, cpu = searched(search, tree(search, model={"name": model}), count)
        runnable = sum(result.status != "invalid" for result in answers.results)
        probes = sum(result.probes for result in answers.results)
        print(
            f"{model:14} {len(answers.results):6,} configurations, {runnable:,} can be run: {wall:.1f} s wall, {cpu:.1f} s CPU, "
            f"{60 * runnable / wall:,.0f} a minute, {probes:,} simulations, {conductor.inquiries[0].token_steps:,} token-steps"
        )
        for place, one in enumerate(answers.finalists, 1):
            print(f"    {place}. {one.score_at(one.capacity):.3f} QPS/$, {one.capacity:.2f} req/s: {shown(one.result.choice)}")
        total, seconds = total + runnable, seconds + wall
    print(f"1,000 configurations at this pace: {1000 * seconds / total:.0f} s on {count} workers (target: 300 s on two)")


AROUND = 6
"""Steps of the grid to either side of a capacity."""


def random_jobs(search: Search, number: int) -> list[Job]:
    """Configurations that can be run, drawn from the space."""
    inquiry = Inquiry(search, tree(search), Workshop(search), Inline(Workshop(search)), Store(None), "benchmark")
    combinations = list(choices(dimensions(search.space), search, inquiry.tree))
    random.Random(0).shuffle(combinations)
    found: list[Job] = []
    for place, choice in enumerate(combinations):
        candidate = inquiry.candidate(place, choice)
        if isinstance(candidate, Candidate):
            found.append(candidate.job)
        if len(found) == number:
            break
    return found


def grid(smoke: bool, _: int) -> None:
    """Capacities against a grid of 1 % steps, 6 % to either side: its highest rate below which all pass, and its last."""
    search = asked(space=paper_space() | ({"replica.pp": [1]} if smoke else {}), **sized(smoke))
    workshop = Workshop(search)
    first: list[float] = []
    last: list[float] = []
    jobs = random_jobs(search, 2 if smoke else int(word("--sample") or 50))
    for number, job in list(enumerate(jobs, 1))[int(word("--skip") or 0) :]:
        result = evaluate(workshop, job)
        said = f"    {number:3} {shown(job.choice)}: "
        if result.capacity_rps is None:
            print(said + result.reason, flush=True)
            continue
        setting = workshop.setting(job)
        trial = Trial(search, job, setting)
        place = place_below(result.capacity_rps, search.tolerance)
        places = range(place - AROUND, min(place + AROUND, place_below(setting.highest_rps, search.tolerance)) + 1)
        passed = {each: trial.play(rate_at(each, search.tolerance))[0].passed for each in places}
        until = next((each - 1 for each, good in passed.items() if not good), places[-1])
        first.append(rate_at(until, search.tolerance) / result.capacity_rps - 1)
        last.append(rate_at(max(each for each, good in passed.items() if good), search.tolerance) / result.capacity_rps - 1)
        print(
            said + f"{result.capacity_rps:.3f} req/s; all lower rates pass up to {100 * first[-1]:+.1f} %, "
            f"the last that does is {100 * last[-1]:+.1f} %",
            flush=True,
        )
    close = sum(abs(each) <= 0.02 for each in first)
    odd = sum(one != other for one, other in zip(first, last, strict=True))
    print(f"{len(first)} capacities: {close} within 2 % of the highest rate below which all pass, the worst "
          f"{100 * min(first):.1f} %")  # fmt: skip
    print(f"    in {odd} of them a lower rate fails where a higher one passes, up to {100 * max(last):.1f} % higher")


def workers(smoke: bool, count: int) -> None:
    """The same search on one process and on several."""
    narrow = {"replica.pp": [1], "batching.kind": ["vllm"]} | ({"replica.tp": [4]} if smoke else {})
    few: dict[str, Any] = FEW if smoke else {"num_requests": 200, "warm_up": 20}
    search = asked(space=paper_space() | narrow, top=2, seeds=2, **few)
    times, found = [], []
    for number in (1, max(2, count)):
        answers, _, wall, _ = searched(search, tree(search), number)
        times.append(wall)
        found.append((answers.results, answers.finalists))
    same = "identical" if found[0] == found[1] else "DIFFERENT"
    print(f"{len(found[0][0])} configurations on 1 and {max(2, count)} workers: {same}; {times[0]:.1f} s and {times[1]:.1f} s")


def share(smoke: bool, count: int) -> None:
    """Token-steps with bounds and early rejection, against capacities of everything, on a sample of the whole space."""
    search = asked(space=paper_space() | ({"replica.pp": [1]} if smoke else {}), top=1, **sized(smoke))
    jobs = random_jobs(search, 8 if smoke else int(word("--sample") or 96))
    wanted = [job.choice for job in jobs]
    pool, everything = workers_for(search, count), store()
    pruned, whole = (
        Inquiry(search, tree(search), Workshop(search), pool, known, code_version()) for known in (Store(None), everything)
    )
    best_of = ranked(thorough(pruned, wanted))[0].score
    print(f"    pruned: {pruned.token_steps:,} token-steps, {pruned.num_runs:,} runs", flush=True)
    results = whole.ask(whole.survey(wanted), None)
    pool.close()
    everything.close()
    all_of_it = sum(result.token_steps for result in results)
    same = "the same best" if best_of == ranked(results)[0].score else "ANOTHER best"
    print(f"{len(jobs)} configurations, drawn from all six policies: {pruned.token_steps:,} of {all_of_it:,} token-steps: "
          f"{100 * pruned.token_steps / all_of_it:.1f} % (target: 15 %), {same}")  # fmt: skip


def strategies(smoke: bool, count: int) -> None:
    """What each strategy finds in the whole space, and for how much work."""
    narrow = {"replica.pp": [1], "batching.kind": ["vllm"], "replica.tp": [2, 4]} if smoke else {}
    found: set[float] = set()
    for strategy in ("exhaustive", "halving", "sampler"):
        search = asked(space=paper_space() | narrow, strategy=strategy, top=1, seeds=1, uncertainty=0.1, **sized(smoke))
        try:
            answers, conductor, wall, cpu = searched(search, tree(search), count)
        except ConfigError as error:  # the sampler is an extra
            print(f"    {strategy:10} {error}")
            continue
        inquiry, best = conductor.inquiries[0], answers.finalists[0].result
        found.add(best.score or 0.0)
        print(
            f"    {strategy:10} {best.score:.4f} QPS/$: {len(answers.results):,} configurations looked at, {inquiry.num_runs:,} "
            f"runs, {inquiry.token_steps:,} token-steps, {wall:.0f} s wall, {cpu:.0f} s CPU; {shown(best.choice)}",
            flush=True,
        )
    print("the same best" if len(found) == 1 else "ANOTHER best")


def study(smoke: bool, count: int) -> None:
    """The what-if study: the best deployment of every model under every workload, and what trying all on GPUs would have cost."""
    total = {"now": 0.0, "cpu": 0.0, "runs": 0.0, "gpu_hours": 0.0, "usd": 0.0}
    figure: dict[str, dict[str, str]] = {}
    for model in MODELS[::3] if smoke else MODELS:
        for workload in WORKLOADS[::2] if smoke else WORKLOADS:
            if word("--only") not in f"{model} {workload}":
                continue
            narrow = {"replica.pp": [1], "batching.kind": ["vllm"], "replica.tp": [4]} if smoke else {}
            search = asked(space=paper_space() | narrow, top=1, seeds=1, uncertainty=0.1, **(FEW if smoke else {}))
            answers, conductor, wall, cpu = searched(search, tree(search, workload, model={"name": model}), count)
            inquiry, results = conductor.inquiries[0], answers.results
            of = {
                "now": inquiry.num_runs, "cpu": cpu, "runs": sum(one.probes for one in results),
                "gpu_hours": sum(one.played_gpu_hours for one in results),
                "usd": sum(one.played_gpu_hours * one.usd_per_gpu_hour for one in results),
            }  # fmt: skip
            total = {name: total[name] + value for name, value in of.items()}
            print(
                f"{model:12} {workload:14} {len(results):,} configurations: {inquiry.num_runs:,} runs now in {wall:.0f} s, "
                f"{cpu:.0f} s CPU; {of['runs']:,} runs with whole samples avoided {of['gpu_hours']:,.0f} GPU-hours, "
                f"{of['usd']:,.0f} USD; " + _best(answers),
                flush=True,
            )
            one = answers.finalists[0] if answers.finalists else None
            said = "none" if one is None else f"{one.score_at(one.capacity):.3f} {one.result.gpu}"
            figure.setdefault(model, {})[workload] = said
    print("QPS per dollar an hour (the paper's figure 6), and on which GPU")
    print(f"{'':12} " + " ".join(f"{workload:>18}" for workload in WORKLOADS))
    for model, row in figure.items():
        print(f"{model:12} " + " ".join(f"{row.get(workload, '-'):>18}" for workload in WORKLOADS))
    each = total["cpu"] / max(1.0, total["now"])
    hours, usd = (35_565 * total[name] / max(1.0, total["runs"]) for name in ("gpu_hours", "usd"))
    print(
        f"{total['now']:,.0f} runs in {total['cpu']:,.0f} s CPU ({1000 * each:.0f} ms a run); 35,565 runs at this pace: "
        f"{35_565 * each / 2 / 60:.0f} min on two cores (target: 30; the paper: 12.5 h on 96), {hours:,.0f} GPU-hours and "
        f"{usd:,.0f} USD avoided. The answers above need no more runs than these: bounds reject the others"
    )


def _best(answers: Answers) -> str:
    if not answers.finalists:
        return "nothing keeps the limits"
    one = answers.finalists[0]
    other = [result for result in answers.results if result.gpu and result.gpu != one.result.gpu]
    at_most = max((result.score_at_most or 0.0 for result in other), default=0.0)
    return f"{one.score_at(one.capacity):.3f} QPS/$ (the other GPU: at most {at_most:.3f}): {shown(one.result.choice)}"


def scaling(smoke: bool, count: int) -> None:
    """The cheapest fixed fleet for an hour of code completion, and the cheapest that changes its size."""
    path = SHARED / "traces" / "azure2023_code.csv"
    if not path.is_file():
        print(f"no {path}: the Azure code trace of 2023 is needed (set SQUALL_SHARED)")
        return
    table: dict[str, Any] = {"kind": "trace", "path": str(path)} | ({"max_requests": 600} if smoke else {})
    fixed = {"fleet.replicas": {"from": 1, "to": 12, "step": 1}, "cluster.gpu": ["a100", "h100"]}
    elastic: dict[str, Any] = {
        "cluster.gpu": ["a100", "h100"],
        "fleet": [
            *({"replicas": {"min": low, "max": 12}} for low in (1, 2, 3)),
            {"mode": "disaggregated", "prefill": {"min": 1, "max": 8}, "decode": {"min": 1, "max": 4}},
            {"mode": "disaggregated", "prefill": {"min": 2, "max": 8}, "decode": 1},
        ],
        "scale": [
            *({"kind": "concurrency", "target": target} for target in (4.0, 16.0)),
            {"kind": "utilisation"},
            *({"kind": "ttft", "ttft_s": 2.0, "lower": lower, "upper": upper} for lower, upper in ((0.1, 0.3), (0.3, 0.7))),
            {"kind": "blitz"},
        ],
        "load": [{"kind": "disk"}, {"kind": "p2p"}, {"kind": "p2p", "live": True}, {"kind": "auto"}],
    }  # fmt: skip
    if smoke or word("--sample"):
        elastic |= {
            "scale": elastic["scale"][::3],
            "load": elastic["load"][: 1 if smoke else 4 : 2],
            "fleet": elastic["fleet"][1:4:2],
        }
    slo = {"ttft_s": 2.0, "tbt_s": 0.1, "attainment": 0.99}
    for name, space in (("fixed", fixed), ("elastic", elastic)):
        search = asked(space=space, objective="usd", top=1)
        batching = {"kind": "vllm", "max_num_batched_tokens": 1024}
        base = tree(search, model={"name": "llama-3-8b"}, workload=table, slo=slo, batching=batching)
        answers, _, wall, cpu = searched(search, base, count)
        best = answers.finalists[0].result if answers.finalists else None
        said = f"{best.cost_usd:.2f} USD: {shown(best.choice)}" if best and best.cost_usd is not None else "none keeps the limits"
        print(
            f"{name}: {len(answers.results)} configurations in {wall:.0f} s, {cpu:.0f} s CPU "
            f"({summary_line(answers.results)}); {said}",
            flush=True,
        )
        for line in reasons(answers.results):
            print(f"    {line}")


ROWS: dict[str, Callable[[bool, int], None]] = {
    "space": space, "grid": grid, "workers": workers, "share": share, "strategies": strategies,
    "paper": lambda smoke, count: paper(smoke, lambda search, base: searched(search, base, count)[0]),
    "operators": lambda smoke, _: operators(smoke), "gap": lambda smoke, _: gap(smoke), "study": study, "scaling": scaling,
}  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    words = sys.argv[1:]
    smoke = "--smoke" in words
    count = int(words[words.index("--workers") + 1]) if "--workers" in words else 2
    for name in [each for each in words if each in ROWS] or ROWS:
        print(f"-- {name}")
        ROWS[name](smoke, count)


if __name__ == "__main__":
    main()
