"""Runs of Vidur (commit 7d47513), replayed step by step: the same batches, at the same instants, with the same blocks.

The recorded time of every batch at every stage is fed as the price of the step, each rounded once to whole nanoseconds. So
instants differ by half a nanosecond a step of the busy period, at most; composition, blocks and preemptions must not differ.

What each run needs, beside its sizes:

| run | policy | quirks | why |
|---|---|---|---|
| g01, g10, g12, g15 | sarathi | none | no memory pressure: our defaults |
| g06 | sarathi | vidur | one preemption; a decode is asked for a free block that it does not take |
| g08 | sarathi | none | two pipeline stages |
| g02, g14 | vllm_v0 | none | no preemption |
| g07 | vllm_v0 | vidur | 27 preemptions, as g06 |
| g03 | orca | none | reserves `max_tokens` for every request |
| g04 | faster_transformer | none | all answers are equally long: nothing ends early, nothing leaks |
| g05 | lightllm | none | the trace's lengths stand for the clients' limits |

Vidur's blocks are counted when a batch begins at a stage; its router is replayed (g12: as recorded).
"""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import Struct

from squall.config import Config, ReplicaSpec
from squall.core.actions import AnyAction, Forget, Preempt, RunSteps
from squall.core.events import AnyEvent, StepsDone
from squall.core.fleet_view import RouteView
from squall.core.types import MachineId, Nanos, ReplicaId, Request, RequestId
from squall.fleet_tables import Fleet
from squall.perf.latency import UNITS_PER_NANO, BatchShape, Progression
from squall.policies.batching import Batching, FasterTransformer, LightLlm, Orca, Sarathi, VllmV0
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

pytestmark = pytest.mark.shared

RUNS = {
    "g01_readme_l3-8b_a100_sarathi": "none",
    "g02_l2-7b_a100_vllm_codetrace_replay": "none",
    "g03_l2-7b_a100_orca_uniform_poisson": "none",
    "g04_l2-7b_a100_ft_fixed_poisson": "none",
    "g05_l2-7b_a100_lightllm_zipf_gamma": "none",
    "g06_l2-70b_a100dgx_tp2_sarathi_arxiv_REALATTN": "vidur",
    "g07_l2-7b_a100_vllm_preempt": "vidur",
    "g08_cl34b_a100dgx_tp2pp2_sarathi_REALATTN": "none",
    "g10_qwen72b_h100dgx_tp4_sarathi_offline": "none",
    "g12_l2-7b_a100_3rep_random_sarathi": "none",
    "g14_l2-70b_h100dgx_tp4_vllm_code": "none",
    "g15_l2-7b_a100_linreg_sarathi": "none",
}


class Batch(Struct, frozen=True):
    """One batch: when its first stage began, whom it worked on ((request, tokens, tokens processed before), by request), and
    the blocks allocated then."""

    replica: ReplicaId
    started_at_s: float
    work: tuple[tuple[int, int, int], ...]
    blocks: int


class Recorded(Struct, frozen=True):
    """A run of Vidur: its batches in the order in which they were formed, and how long each took at each stage."""

    batches: list[Batch]
    times: list[tuple[Nanos, ...]]


class RecordedTimes:
    """A `LatencyModel` that gives every step the recorded time of the batch formed at this point of the run."""

    source = "recorded"

    def __init__(self, times: Sequence[tuple[Nanos, ...]]) -> None:
        self.num_stages = len(times[0])
        self._times = iter(times)

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        assert steps == 1
        (time,) = self.stages(shape)
        return [Progression(1, time * UNITS_PER_NANO, 0)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return next(self._times)


class AsRecorded(Struct, frozen=True):
    """A route policy that sends every request to where Vidur sent it."""

    replicas: dict[int, int]

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        return self.replicas[request.id]


class Books:
    """Keeps the books of every replica as an engine would, from its actions alone."""

    def __init__(self, requests: Sequence[OfferedRequest], block_size: int) -> None:
        self.batches: list[Batch] = []
        self._prompts = {r.id: r.num_prompt_tokens for r in requests}
        self._size = block_size
        self._tokens: dict[RequestId, int] = {}  # with KV, or about to have
        self._blocks: dict[ReplicaId, dict[RequestId, int]] = defaultdict(dict)
        self._groups: dict[ReplicaId, dict[int, list[RequestId]]] = defaultdict(lambda: defaultdict(list))
        self._runs: dict[tuple[ReplicaId, int], RunSteps] = {}

    def __call__(self, now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if id < 0:
            return
        if isinstance(event, StepsDone):
            run = self._runs.pop((id, event.run))
            self._groups[id][run.group] += [chunk.request for chunk in run.chunks if chunk.last]
            self._free(id, event.stopped)
        for action in actions:
            if isinstance(action, Preempt | Forget):
                self._free(id, action.requests)
            elif isinstance(action, RunSteps):
                self._begin(now, id, action)

    def _free(self, id: ReplicaId, requests: Sequence[RequestId]) -> None:
        for request in requests:
            self._blocks[id].pop(request)
            for group in self._groups[id].values():
                if request in group:
                    group.remove(request)

    def _begin(self, now: Nanos, id: ReplicaId, run: RunSteps) -> None:
        groups = self._groups[id]
        for moved in run.regrouped:
            for group in groups.values():
                group[:] = [request for request in group if request not in moved.requests]
            groups[moved.group] += moved.requests
        self._runs[id, run.run] = run
        work = []
        held = self._blocks[id]
        if run.num_decodes:
            assert len(groups[run.group]) == run.num_decodes
            for request in groups[run.group]:
                self._tokens[request] += 1
                work.append((request, 1, self._tokens[request]))
                held[request] = max(held[request], -(-self._tokens[request] // self._size))
        for chunk in run.chunks:
            self._tokens[chunk.request] = end = chunk.offset + chunk.num_tokens
            work.append((chunk.request, chunk.num_tokens, chunk.offset))
            held[chunk.request] = max(held.get(chunk.request, 0), chunk.num_reserved, -(-end // self._size))
        self.batches.append(Batch(id, now / 1e9, tuple(sorted(work)), sum(held.values())))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read(folder: Path) -> Recorded:
    rows: dict[int, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(folder / "batch_stages.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["batch_id"])].append(row)
    batches, times = [], []
    for id in sorted(rows):
        stages = sorted(rows[id], key=lambda row: int(row["stage_id"]))
        work = (tuple(int(part) for part in each.split(":")) for each in stages[0]["req:tokens:processed_before"].split(";"))
        first = stages[0]
        started_at_s, blocks = float(first["scheduled_at_s"]), int(first["allocated_blocks"])
        batches.append(Batch(int(first["replica_id"]), started_at_s, tuple(sorted(work)), blocks))  # type: ignore[arg-type]
        times.append(tuple(round(float(row["execution_time_s"]) * 1e9) for row in stages))
    return Recorded(batches, times)


def policy(config: dict, quirks: str) -> Batching:  # type: ignore[type-arg] # as JSON has it
    keys = config["cluster_config"]["replica_scheduler_config"]
    cap = keys["batch_size_cap"]
    slots = min(int(config["_derived"]["max_batch_size"]), cap)
    length = config["request_generator_config"]["max_tokens"]
    match keys["name"]:
        case "sarathi":
            return Sarathi(cap, keys["chunk_size"], keys["watermark_blocks_fraction"], quirks=quirks)  # type: ignore[arg-type]
        case "vllm":
            return VllmV0(cap, keys["max_tokens_in_batch"], keys["watermark_blocks_fraction"], quirks=quirks)  # type: ignore[arg-type]
        case "orca":
            return Orca(slots, length)
        case "faster_transformer":
            return FasterTransformer(slots, length)
        case "lightllm":
            return LightLlm(cap, keys["max_tokens_in_batch"], keys["max_waiting_iters"])
    raise AssertionError(keys["name"])


@pytest.mark.parametrize("name", RUNS)
def test_every_batch_and_every_request_is_as_recorded(golden: Path, name: str) -> None:
    folder = golden / name
    config = json.loads((folder / "config.json").read_text())
    recorded = read(folder)
    requests = [
        OfferedRequest(
            int(row["request_id"]),
            round(float(row["arrived_at"]) * 1e9),
            int(float(row["num_prefill_tokens"])),
            int(float(row["num_decode_tokens"])),
        )
        for row in table(folder / "requests.csv")
    ]
    spec = ReplicaSpec(
        pp=config["cluster_config"]["replica_config"]["num_pipeline_stages"],
        block_size=config["cluster_config"]["replica_scheduler_config"]["block_size"],
    )
    books = Books(requests, spec.block_size)
    record = simulate(
        Config(
            replica=spec,
            batching=policy(config, RUNS[name]),
            route=AsRecorded({request: batch.replica for batch in recorded.batches for request, *_ in batch.work}),  # type: ignore[arg-type]
            fleet=Fleet(replicas=config["cluster_config"]["num_replicas"]),
        ),
        requests,
        RecordedTimes(recorded.times),
        int(config["_derived"]["num_blocks"]),
        max_steps=1,
        log=books,
    )
    check_batches(recorded, books.batches, spec.pp)
    metrics = {int(row["Request Id"]): row for row in table(folder / "request_metrics.csv")}
    slack = 1e-9 * (len(recorded.batches) / 2 + 2)
    for row, request in zip(record.requests, requests, strict=True):
        theirs = metrics[row.id]
        e2e, ttft = (row.finished_at - row.arrived_at) / 1e9, (row.first_token_at - row.arrived_at) / 1e9
        assert row.preemptions == int(float(theirs["request_num_restarts"]))
        assert e2e == pytest.approx(float(theirs["request_e2e_time"]), abs=slack)
        assert ttft == pytest.approx(float(theirs["prefill_e2e_time"]), abs=slack)
        # Vidur divides by all tokens of the decode phase, as a restart left it, though there is one gap fewer
        divisor = (
            float(theirs["request_num_decode_tokens"])
            if not row.preemptions
            else e2e / float(theirs["request_e2e_time_normalized"])
        )
        tpot = float(theirs["decode_time_execution_plus_preemption_normalized"])
        assert (e2e - ttft) / divisor == pytest.approx(tpot, abs=slack)
        assert row.num_output_tokens == request.num_output_tokens


def check_batches(recorded: Recorded, ours: Sequence[Batch], num_stages: int) -> None:
    """The same batches in the same order; blocks where the batch's first stage begins when it is formed."""
    for number, (theirs, mine) in enumerate(zip(recorded.batches, ours, strict=False)):
        slack = 1e-9 * (number / 2 + 2)
        assert (mine.replica, mine.work) == (theirs.replica, theirs.work), number
        assert num_stages > 1 or mine.blocks == theirs.blocks, number
        assert mine.started_at_s <= theirs.started_at_s + slack, number
        assert num_stages > 1 or mine.started_at_s == pytest.approx(theirs.started_at_s, abs=slack), number
    assert len(ours) == len(recorded.batches)
    if num_stages > 1:
        check_pipeline(recorded, ours)


def check_pipeline(recorded: Recorded, ours: Sequence[Batch]) -> None:
    """A batch begins when it is formed or when the one before it leaves the first stage; blocks where both coincide."""
    num_compared = 0
    free_at_s = 0.0
    for (theirs, mine), times in zip(zip(recorded.batches, ours, strict=True), recorded.times, strict=True):
        begins_at_s = max(mine.started_at_s, free_at_s)
        assert begins_at_s == pytest.approx(theirs.started_at_s, abs=1e-9 * (len(ours) + 2))
        free_at_s = begins_at_s + times[0] / 1e9
        if begins_at_s == mine.started_at_s:
            assert mine.blocks == theirs.blocks
            num_compared += 1
    assert num_compared > len(ours) / 3
    assert all(one.started_at_s <= two.started_at_s for one, two in pairwise(ours))
