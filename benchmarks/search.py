"""How fast and how exact `squall search` is.

    python benchmarks/search.py [--smoke] [--workers N] [--only TEXT] [--sample N] [--store FILE] [ROW ...]

Rows, and their targets on two cores: `space`, 1,000 configurations of Llama-2-70B and Qwen-72B under five minutes; `grid`,
capacities within 2 % of a fine grid on 50 random configurations; `workers`, the same answer whatever the number of workers;
`share`, at most 15 % of the token-steps that trying everything takes, and the same best; `paper`, Vidur's best configuration for
LLaMA2-70B on conversation lengths (TP 2 x PP 2 on H100, Sarathi, chunk 512, batch 256) in our top three, or why not; `gap`, why
Qwen-72B costs so much more than Llama-2-70B; `study`, the what-if study of the Vidur paper, four models under three workloads on
two GPUs, 35,565 runs in 30 minutes (`--only qwen` takes the pairs that are called so; with `--store` it goes on where it was
ended, and says at once what it knows); `scaling`, an autoscaled search over the
Azure code hour, 200 configurations in ten minutes. `--sample` takes so many configurations in `grid`, `share` and `scaling`.

Lengths are those of the workloads chat-lmsys-1m, arxiv-4k and bwb-4k: generated, by the Vidur paper's statistics. Times are wall
seconds, and CPU seconds of all processes; other work on the machine shows in the former, and a little in the latter.
"""

import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from squall.core.actions import Chunk, RunSteps
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.tables.choose import import_profile
from squall.perf.tables.profile import save
from squall.search.answers import summary_line
from squall.search.capacity import place_below, rate_at
from squall.search.command import reasons
from squall.search.conduct import Conductor
from squall.search.evaluate import Trial, evaluate
from squall.search.inquiry import Candidate, Inquiry
from squall.search.output import Answers
from squall.search.pool import Inline, Processes, Workers
from squall.search.result import Job
from squall.search.setting import Workshop
from squall.search.space import choices, dimensions, shown, usual_space, with_choice
from squall.search.spec import Search, read_search
from squall.search.store import Store, code_version
from squall.search.strategy import ranked, thorough

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared")) / "data"
SLO = {"ttft_p90_s": 2.0, "tbt_p99_s": 0.2}
FEW = {"num_requests": 60, "warm_up": 6, "span_s": 2}
"""Of a smoke: enough to see all of the machinery work, and too few to believe a figure."""

MODELS = ("llama-2-7b", "internlm-20b", "llama-2-70b", "qwen-72b")
WORKLOADS = ("chat-lmsys-1m", "arxiv-4k", "bwb-4k")


def tree(search: Search, named: str = WORKLOADS[0], **more: Any) -> dict[str, Any]:
    """The configuration that is searched."""
    table: dict[str, Any] = {"kind": "named", "name": named, "num_requests": search.num_requests}
    table["arrivals"] = {"kind": "poisson", "rate_rps": 1.0}
    tables = {"model": {"name": "llama-2-70b"}, "cluster": {"gpu": "h100", "nodes": 64}, "slo": SLO, "workload": table}
    return tables | more


def paper_space() -> dict[str, Any]:
    """GPU, shares, stages, every batching policy with its bounds."""
    space = usual_space(Search(max_gpus_per_replica=16), ["a100", "h100"], {})
    return space | {"replica.tp": [1, 2, 4, 8], "replica.pp": [1, 2, 4]}


def asked(**more: Any) -> Search:
    return read_search("benchmark", {"max_gpus_per_replica": 16, "space": paper_space()} | more)


def workers_for(search: Search, count: int) -> Workers:
    return Inline(Workshop(search)) if count == 1 else Processes(search, count)


def word(name: str) -> str:
    """What follows an option on the command line; empty where it is not there."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def searched(search: Search, base: dict[str, Any], count: int) -> tuple[Answers, Conductor, float, float]:
    """The answers, who found them, wall seconds and CPU seconds."""
    workers = workers_for(search, count)
    began, spent = time.perf_counter(), sum(os.times()[:4])
    store = Store(Path(word("--store")) if word("--store") else None)
    conductor = Conductor(search, base, workers, store, code_version(), lambda _: None)
    try:
        answers = conductor.answers()
    finally:
        workers.close()
        store.close()
    return answers, conductor, time.perf_counter() - began, sum(os.times()[:4]) - spent


def space(smoke: bool, count: int) -> None:
    """All configurations of two models."""
    models = ["llama-2-70b"] if smoke else ["llama-2-70b", "qwen-72b"]
    narrowed: dict[str, Any] = {}
    if smoke:
        narrowed = {"replica.pp": [1, 2], "replica.tp": [2, 4], "batching.kind": ["vllm"], "batching.max_num_seqs": [128]}
    total, seconds = 0, 0.0
    for model in models:
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
    """Capacities against a grid of 1 % steps, 12 % to either side: its highest rate below which all pass, and its last."""
    search = asked(space=paper_space() | ({"replica.pp": [1]} if smoke else {}), **(FEW if smoke else {}))
    workshop = Workshop(search)
    first: list[float] = []
    last: list[float] = []
    for job in random_jobs(search, 2 if smoke else int(word("--sample") or 50)):
        result = evaluate(workshop, job)
        if result.capacity_rps is None:
            continue
        setting = workshop.setting(job)
        trial = Trial(search, job, setting)
        place = place_below(result.capacity_rps, search.tolerance)
        places = range(place - 12, min(place + 12, place_below(setting.highest_rps, search.tolerance)) + 1)
        passed = {each: trial.play(rate_at(each, search.tolerance))[0].passed for each in places}
        until = next((each - 1 for each, good in passed.items() if not good), places[-1])
        first.append(rate_at(until, search.tolerance) / result.capacity_rps - 1)
        last.append(rate_at(max(each for each, good in passed.items() if good), search.tolerance) / result.capacity_rps - 1)
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
    search = asked(space=paper_space() | ({"replica.pp": [1]} if smoke else {}), top=1, **(FEW if smoke else {}))
    jobs = random_jobs(search, 8 if smoke else int(word("--sample") or 96))
    found: dict[bool, tuple[float | None, int]] = {}
    for all_of_it in (False, True):
        pool = workers_for(search, count)
        inquiry = Inquiry(search, tree(search), Workshop(search), pool, Store(None), "benchmark")
        wanted = [job.choice for job in jobs]
        results = inquiry.ask(inquiry.survey(wanted), None) if all_of_it else thorough(inquiry, wanted)
        pool.close()
        found[all_of_it] = ranked(results)[0].score, inquiry.token_steps
    (best, steps), (truth, all_steps) = found[False], found[True]
    same = "the same best" if best == truth else "ANOTHER best"
    print(f"{len(jobs)} configurations, drawn from all six policies: {steps:,} of {all_steps:,} token-steps: "
          f"{100 * steps / all_steps:.1f} % (target: 15 %), {same}")  # fmt: skip


def paper(smoke: bool, count: int) -> None:
    """Vidur's own space for LLaMA2-70B on conversation lengths, and where its best stands: ours and with Vidur's operator tables.

    The space is that of Vidur-Search (its config_explorer/config/config.yml): machines of four GPUs, no TP 1 for this model, vLLM
    (of its time) and Sarathi. Vidur multiplies its batch size by the stages of the pipeline: 256 are 512 here.
    """
    space: dict[str, Any] = {
        "cluster.gpu": ["a100", "h100"], "replica.tp": [2, 4], "replica.pp": [1, 2, 4], "batching.kind": ["sarathi", "vllm_v0"],
        "batching.max_num_seqs": [64, 128, 256, 512],
        "batching.chunk_size": {"values": [256, 512, 1024, 2048, 4096], "when": {"batching.kind": "sarathi"}},
    }  # fmt: skip
    if smoke:
        space |= {"batching.max_num_seqs": [512], "batching.chunk_size": [512, 1024], "replica.pp": [1, 2]}
    search = asked(space=space, top=3, **(FEW if smoke else {}))
    fours = {"gpu": "h100", "nodes": 16, "gpus_per_node": 4}
    answers, _, wall, _ = searched(search, tree(search, cluster=fours), count)
    for place, one in enumerate(answers.finalists, 1):
        print(f"    {place}. {one.score_at(one.capacity):.3f} QPS/$, {one.capacity:.2f} req/s: {shown(one.result.choice)}")
    print(f"{len(answers.results)} configurations in {wall:.1f} s; Vidur's published best: 0.2 QPS/$, at its prices")
    folder = SHARED / "vidur_profiles" / "h100"
    tables: dict[str, dict[str, Any]] = {"our prices": {}}
    if folder.is_dir():
        tables["Vidur's matrix products"] = _imported(folder)
    workshop = Workshop(search)
    for name, latency in tables.items():
        for tp, pp, chunk in ((2, 2, 512), (2, 2, 1024), (1, 4, 512))[: 1 if smoke else 3]:
            batching = {"kind": "sarathi", "chunk_size": chunk, "max_num_seqs": 512}
            choice = {"cluster.gpu": "h100", "replica.tp": tp, "replica.pp": pp, "batching": batching}
            base = with_choice(tree(search, latency=latency), choice)
            job = Job(0, choice, base, None, search.num_requests, search.warm_up, search.span_s)
            result = evaluate(workshop, job)
            step = RunSteps(0, 1, 128, 128 * 900, (Chunk(0, 0, chunk - 128, 0, False),))
            stages = " + ".join(f"{nanos / 1e6:.0f}" for nanos in workshop.setting(job).latency.stages(step))
            print(
                f"    {name}: TP {tp} x PP {pp}, chunk {chunk}: {result.capacity_rps or 0:.2f} req/s, "
                f"{result.score or 0:.3f} QPS/$, beyond: {result.binding}; a full step with 128 decodes takes {stages} ms",
                flush=True,
            )


def _imported(folder: Path) -> dict[str, Any]:
    """A `[latency]` table with the tables in `folder`, as `squall profile import` reads them."""
    place = Path(tempfile.mkdtemp(prefix="squall-search-")) / "profile.parquet"
    save(import_profile("vidur", folder, resolve_gpu("h100"), resolve_model("llama-2-70b"), ""), place)
    return {"kind": "measured", "path": str(place)}


def gap(smoke: bool, _: int) -> None:
    """Why Qwen-72B costs more than Llama-2-70B: every head has keys and values of its own, so the pool holds fewer requests."""
    search = asked(**(FEW if smoke else {}))
    workshop = Workshop(search)
    for name in ("llama-2-70b", "qwen-72b"):
        choice = {"cluster.gpu": "h100", "replica.tp": 4, "batching": {"kind": "sarathi", "chunk_size": 512}}
        base = with_choice(tree(search, model={"name": name}), choice)
        setting = workshop.setting(Job(0, choice, base, num_requests=search.num_requests, warm_up=search.warm_up))
        sample, bytes_each = setting.sample, setting.model.kv_bytes_per_token("bf16")
        held = sample.context / sample.num_gaps
        print(
            f"{name:12} {bytes_each / 1024:7,.0f} KiB of KV a token; on 4 x H100 {setting.num_blocks * 16:9,} tokens, "
            f"{setting.num_blocks * 16 / held:6,.0f} requests of {held:,.0f} tokens; a step with 64 of them: "
            f"{setting.latency.run(RunSteps(0, 1, 64, round(64 * held), ()), 1)[0].first / 16e6:.1f} ms"
        )


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
    "space": space, "grid": grid, "workers": workers, "share": share, "paper": paper, "gap": gap, "study": study,
    "scaling": scaling,
}  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    words = sys.argv[1:]
    smoke = "--smoke" in words
    count = int(words[words.index("--workers") + 1]) if "--workers" in words else 2
    for name in [word for word in words if word in ROWS] or ROWS:
        print(f"-- {name}")
        ROWS[name](smoke, count)


if __name__ == "__main__":
    main()
