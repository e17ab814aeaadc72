"""Whether Vidur's best deployment for LLaMA2-70B on conversation lengths is among our three best; and why Qwen-72B costs more.

The space is that of Vidur-Search (its config_explorer/config/config.yml): machines of four GPUs, no TP 1 for this model, vLLM (of
its time) and Sarathi. Vidur multiplies its batch size by the stages of the pipeline: 256 are 512 here.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.vidur.operators import STEP, best_job, imported
from benchmarks.vidur.question import FEW, asked, tree
from squall.core.actions import Chunk, RunSteps
from squall.search.evaluate import evaluate
from squall.search.output import Answers
from squall.search.result import Job
from squall.search.setting import Workshop
from squall.search.space import shown, with_choice
from squall.search.spec import Search

SPACE: dict[str, Any] = {
    "cluster.gpu": ["a100", "h100"], "replica.tp": [2, 4], "replica.pp": [1, 2, 4], "batching.kind": ["sarathi", "vllm_v0"],
    "batching.max_num_seqs": [64, 128, 256, 512],
    "batching.chunk_size": {"values": [256, 512, 1024, 2048, 4096], "when": {"batching.kind": "sarathi"}},
}  # fmt: skip
SMALL: dict[str, Any] = {"batching.max_num_seqs": [512], "batching.chunk_size": [512, 1024], "replica.pp": [1, 2]}
FOURS = {"gpu": "h100", "nodes": 16, "gpus_per_node": 4}
TOP = 3

Searched = Callable[[Search, dict[str, Any]], Answers]
"""Gives the answers to a question about a configuration."""


def paper(smoke: bool, searched: Searched) -> None:
    """Vidur's space by our prices and by its tables, and where its best stands."""
    space = SPACE | (SMALL if smoke else {})
    tables = {gpu: imported(gpu) for gpu in ("h100", "a100")}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, str]]]] = {"our prices": ({}, {}, [])}
    if tables["h100"]:
        paths = {gpu: latency["path"] for gpu, latency in tables.items()}
        others = [{"cluster.gpu": gpu, "latency.path": path} for gpu in paths for name, path in paths.items() if name != gpu]
        ways["Vidur's tables"] = ({"kind": "measured"}, {"latency.path": [*paths.values()]}, others)
    for name, (latency, more, exclude) in ways.items():
        search = asked(space=space | more, exclude=exclude, top=TOP, **(FEW if smoke else {}))
        answers = searched(search, tree(search, cluster=FOURS, latency=latency))
        print(f"    {name}: {sum(result.status != 'invalid' for result in answers.results)} configurations can be run")
        for place, one in enumerate(answers.finalists, 1):
            choice = {key: value for key, value in one.result.choice.items() if key != "latency.path"}
            print(f"    {place}. {one.score_at(one.capacity):.3f} QPS/$, {one.capacity:.2f} req/s: {shown(choice)}")
        theirs = evaluate(Workshop(search), best_job(search, tables["h100"] if latency else {}))
        better = sum((one.result.score or 0.0) > (theirs.score or 0.0) for one in answers.finalists)
        print(
            f"       Vidur's best: {theirs.score or 0:.3f} QPS/$, {theirs.capacity_rps or 0:.2f} req/s, "
            + (f"place {better + 1}" if better < TOP else f"not among the best {TOP}")
            + "; published: 0.2 QPS/$, at its prices",
            flush=True,
        )
    _print_neighbours(smoke, {"our prices": {}, "Vidur's tables": tables["h100"]})


def _print_neighbours(smoke: bool, tables: dict[str, dict[str, Any]]) -> None:
    """Vidur's best beside what is nearly the same."""
    search = asked(**(FEW if smoke else {}))
    workshop = Workshop(search)
    for name, latency in tables.items():
        for tp, pp, chunk in ((2, 2, 512), (2, 2, 1024), (1, 4, 512))[: 1 if smoke else 3]:
            job = best_job(search, latency, tp=tp, pp=pp, chunk=chunk)
            result = evaluate(workshop, job)
            full = RunSteps(0, 1, STEP.num_decodes, STEP.decode_context, (Chunk(0, 0, chunk - STEP.num_decodes, 0, False),))
            stages = " + ".join(f"{nanos / 1e6:.0f}" for nanos in workshop.setting(job).latency.stages(full))
            print(
                f"    {name}: TP {tp} x PP {pp}, chunk {chunk}: {result.capacity_rps or 0:.2f} req/s, "
                f"{result.score or 0:.3f} QPS/$, beyond: {result.binding}; a full step with {STEP.num_decodes} decodes "
                f"takes {stages} ms",
                flush=True,
            )


def gap(smoke: bool) -> None:
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
