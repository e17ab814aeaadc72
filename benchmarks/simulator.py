"""How many requests a second of CPU the simulator serves, beside Vidur and beside what it is to reach.

    python benchmarks/simulator.py [--smoke | --all] [NAME ...]

Without options every case but the million requests, which `--all` adds; a NAME picks those whose name contains it; `--smoke`
plays a part of each, just enough to see that it runs. Lengths and arrivals come from the traces where they lie beside the
checkout (or under $SQUALL_SHARED): Azure's conversations of 2023, and Mooncake's with its block hashes. Without them lengths are
drawn from log-normal distributions with about the same medians, and the Mooncake case is left out.

Times are CPU seconds of the simulating thread (numpy's idle ones spin at times), the median of several runs, and cover the
simulation itself: machines, world and driver. What the first run has worked out of the prices of steps the others find, as they
do in a search. The last line is a whole command with its start-up, in wall time.

Two machines are compared by `unit`: a fixed loop over a heap, a dictionary, objects and Structs, timed before each run. "units a
request" is how many turns of that loop one request costs, and does not depend on the machine, to a tenth or so.

Vidur's figures are its own simulation loop on one core of a 2-core machine, with its forests trained and cached. The goals are
for plain Python there. `make fast` compiles the modules that every event passes (tools/compile.py); the first line of the table
says which were measured, and twice the goals are wanted of those.

What was tried on the first case. Instructions are those that valgrind counts a request, and bytecodes those that a trace function
sees: unlike times they are the same on every run.

    mypyc over the hot modules                       18,500 -> 31,500 requests/s, best of many runs taken by turns
    ranks asked for when a replica is wanted         with constants `Final` and priorities plain integers: nothing in plain
                                                     Python that can be told from noise, 31,500 -> 37,000 compiled
    an entry of `Gaps` packed into bytes             770 -> 260 ns each, -1.5 % of all instructions; a list that is packed later
                                                     costs as much and holds memory
    plans that never change as constants             with the blocks of a run's chunks worked out once instead of twice, no empty
                                                     tuples sorted, no calls for nothing: 217,000 -> 208,000 instructions
    arrivals offered inside the driver's loop        -1 % of the bytecodes by themselves; with one row a request in place of four
                                                     dictionaries, a machine and its engine in one place, and logs told where a
                                                     machine is called: driver, engine and world 1,385 -> 1,008 bytecodes and
                                                     13.6 -> 9.0 calls a request, a tenth of all time
    chains of hashes by sets, not block by block     Mooncake: 9,500 -> 8,000 bytecodes a request with blocks of 512 tokens; with
                                                     blocks of 16 tokens (860 hashes a request) what is left is C
    the garbage collector off                        nothing here: most of what lives for a moment here is not tracked by it
    tokens rounded up to a multiple of 8             not done: a price that is met for the first time has become cheap
    idle blocks by place, not in a linked dict       Mooncake with blocks of 16: a fifth less time, side by side; with blocks of
                                                     512: 7,320 -> 7,150 bytecodes, with growth over whole cycles not summed up
    a pipeline's runs are made once                  TP4 PP2: 14,200 -> 13,000 bytecodes; what a run of several steps would need
                                                     was worked out, and then one step was asked for
    an admission as the first of several steps       0.2 of 2.8 runs a request (sarathi), but 2 % of the bytecodes: longer runs of
                                                     a piece cost more to price; and a decode replica looks at its hand-offs one
                                                     step after an admission, so it is only right without them. Not kept
    a plain boundary asks for no hand-offs or pairs  and a run bounds its blocks in one call, having looked them up once: -110;
                                                     Mooncake with blocks of 512: 7,330 -> 6,950, most of it for what a run of
                                                     one step may evict, which is known without asking
    a router of one replica keeps no heap            -60; of no use to a fleet
    runs of one step look for no end of a sequence   -80, with what the driver needs at hand in one look, the plan in which all
                                                     decode as one object and fewer calls in the policies
    stages with the same attention price it once     TP4 PP2, 300 requests: 13,280 -> 11,920, with runs that take all decodes or
                                                     none without a look at the groups
    the garbage collector off, once more             1,000 replicas: 4.5 % of the time; each look at 700 new objects, which lie
                                                     all over memory, takes half a millisecond, and finds nothing
    `Replica.method(self)` in place of `super()`     TP4 PP2: 4 % of the time; four such calls a run
    what is due as one integer, not a tuple          an elastic hour compiled: a tenth; nothing in plain Python
    idle blocks by chain, not by place               and a set of what is cached beside a dictionary of what is idle: what costs
                                                     is how often a hash is looked up in a table that is in no cache. The pool
                                                     alone: 28 -> 13 us for a chain of 24 blocks, 436 -> 255 for one of 860; all
                                                     that a replica does for a request of Mooncake's in blocks of 512, played
                                                     back: 71 -> 49 us, of which 17 are left without a cache
    a prompt's pieces evict what they take           64 blocks were half of such a piece with blocks of 16: 7.0 -> 3.05 runs and
                                                     15,100 -> 6,700 bytecodes a request; with blocks of 512 3.1 -> 3.0 runs
    huge pages; a CPython built with PGO and LTO     nothing, though the loop of `unit` alone is 1.4 times as fast with the latter
    the straight flow of an ordinary request         nobody cancelled, preempted or handed on, no bend in a price, one group: what
                                                     such a request needs stands in one line of functions, everything else leaves
                                                     it by one check; what was counted twice is counted once (blocks of a chunk,
                                                     tokens at a replica and in the fleet). A request's bytecodes (calls) of the
                                                     router 637 -> 465 (15 -> 9), of prices 614 -> 459 (11 -> 5), of a replica
                                                     2,296 -> 1,874 (55 -> 29): with the line on arrivals above a third more
                                                     requests/s, plain and compiled
    a sorted list of ranks, not a heap               fewer instructions with 1 and 16 replicas, as many with 1,000
    bisection in a price's few knots                 fewer bytecodes than a walk along them, but a call into C of 60 to 75 ns:
                                                     slower by a tenth, compiled by a quarter. Not kept
    a fleet of a thousand that loads at one instant  looked at all that was due for each replica: 11,300 -> 6,600 bytecodes of a
                                                     request where there are three a replica

In plain Python some 3,260 bytecodes a request are left with vllm, for 5.8 events and 2.1 runs of steps; with sarathi 4,110, for
6.5 and 2.8: it cuts most prompts in two or three, each piece another run (and in its first run each of 512 requests pays 1,000
more for prices of new sizes). With a pipeline it is 7 to 8 runs of one step: there only longer runs would help, and they would
have to know of each other's. Swapping to the host adds none where it is not asked for.

Why a bytecode costs ten nanoseconds here and three in a loop of its own: played back one after the other, the events of the
second case cost half of what they do when they are taken by turns, as they are. What they pass through does not fit into a
core's first caches. So neither calls are dear nor any one function, but every line that is passed once a run: only fewer of them
help. A thousand replicas add misses of the second cache: with 2 MB of it 370 a request instead of 40 (cachegrind), spread over
all that an event looks at, as each finds another replica's objects. For comparison, a bare study of the same shape (one replica,
a router and a heap, prices that are one linear formula; no lifecycle, hand-off, cancellation, cache, second group or engine
apart from the machine) serves 62,000 requests/s of the second case's kind on the machine where this serves 23,600: with 2,235
bytecodes a request instead of 3,840 (of its first 6,000), 124,000 instructions instead of 207,000, and 712 misses of a core's
first data cache instead of 2,550 (cachegrind).
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from squall.config import Cluster, Config, Model, ReplicaSpec, Run, dumps
from squall.core.events import StepsDone
from squall.core.metrics import Outcome, RunRecord
from squall.fleet_tables import Fleet
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.batching import Batching, Sarathi, Vllm, VllmV0
from squall.policies.route import LeastLoaded, LeastOutstanding
from squall.report.deployed import deployed
from squall.report.run import write_run
from squall.sim import driver
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse, usd_per_gpu_hour
from squall.workload.build import build
from squall.workload.spec import (
    EmpiricalLength,
    Length,
    LogNormalLength,
    OfferedRequest,
    PoissonArrivals,
    SyntheticWorkload,
    TraceWorkload,
    Workload,
)

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared")) / "data" / "traces"
TRACE, MOONCAKE = TRACES / "azure2023_conv.csv", TRACES / "mooncake_conversation_trace.jsonl"
NUM_CONVERSATIONS = 19_366


class Case(Struct):
    """One line of the table. `vidur` and `goal` are requests a second; 0 where there is no such figure."""

    name: str
    config: Config
    vidur: int
    goal: int
    repeats: int = 5


def drawn(num_requests: int, rate_rps: float) -> Workload:
    """Conversations with Poisson arrivals, as many as one likes."""
    prompt: Length = LogNormalLength(1020, 1.1, 1, 7_000)
    output: Length = LogNormalLength(129, 1.0, 1, 1_000)
    if TRACE.is_file():
        prompt, output = EmpiricalLength(str(TRACE), "ContextTokens"), EmpiricalLength(str(TRACE), "GeneratedTokens")
    return SyntheticWorkload(PoissonArrivals(rate_rps), prompt, output, num_requests)


def workload(num_requests: int, rate_rps: float | None = None) -> Workload:
    """The first conversations of the trace, as they arrived unless a rate is given."""
    if TRACE.is_file():
        arrivals = None if rate_rps is None else PoissonArrivals(rate_rps)
        return TraceWorkload(path=str(TRACE), arrivals=arrivals, max_requests=num_requests)
    return drawn(num_requests, rate_rps or 5.4)


def case(num_requests: int, replicas: int, rate_rps: float, batching: Batching) -> Config:
    return Config(
        model=Model("llama-3-8b"),
        cluster=Cluster(gpu="a100-80g"),
        fleet=Fleet(replicas=replicas),
        batching=batching,
        workload=workload(num_requests, rate_rps),
    )


def cases(part: int, million: bool) -> list[Case]:
    """All cases, each divided by `part`."""
    readme = case(512 // part, 1, 6.45, Sarathi(chunk_size=512))
    spread = replace(case(1, 16, 80.0, VllmV0()), route=LeastOutstanding(), workload=drawn(20_000 // part, 80.0))
    large = replace(
        case(1, 1, 6.45, Sarathi()),
        model=Model("llama-2-70b"),
        replica=ReplicaSpec(tp=4, pp=2),
        workload=workload(1000 // part, 6.45),
    )
    found = [
        Case("README: Llama-3-8B, A100, sarathi 512", readme, 665, 40_000, 15),
        Case("the same, vllm", case(512 // part, 1, 6.45, Vllm()), 0, 0, 15),
        Case(
            "conversations, Llama-2-7B, sarathi",
            replace(readme, model=Model("llama-2-7b"), batching=Sarathi(), workload=workload(NUM_CONVERSATIONS // part)),
            874,
            40_000,
        ),
        Case("16 replicas, vllm_v0, 80/s", spread, 259, 30_000),
        Case("Llama-2-70B TP4 PP2, sarathi, 6.45/s", large, 374, 12_000, 9),
    ]
    if MOONCAKE.is_file():
        trace = TraceWorkload(path=str(MOONCAKE), max_requests=12_031 // part)
        eight = replace(case(1, 8, 1.0, Vllm()), replica=ReplicaSpec(block_size=512), workload=trace)
        found.append(Case("Mooncake, 8 replicas, blocks of 512", eight, 0, 15_000, 3))
        few = replace(trace, max_requests=2_000 // part)
        found.append(Case("Mooncake, 8 replicas, blocks of 16", replace(eight, replica=ReplicaSpec(), workload=few), 0, 0, 3))
    wide = replace(case(1, 1000, 1.0, Vllm()), route=LeastLoaded(), workload=drawn(10_000 // part, 5_000.0))
    found.append(Case("1,000 replicas, 60 % load: ten thousand", wide, 0, 0, 3))
    if million:
        found.append(Case("the same: a million", replace(wide, workload=drawn(1_000_000 // part, 5_000.0)), 0, 22_000, 1))
    return found


def play(config: Config, requests: list[OfferedRequest]) -> tuple[RunRecord, float]:
    """One simulation, and its CPU seconds."""
    latency, blocks = prepare(config, resolve_model(config.model.name), resolve_gpu(config.cluster.gpu))
    began = time.thread_time()
    record = simulate(config, requests, latency, blocks)
    return record, time.thread_time() - began


def unit_s() -> float:
    """CPU seconds of one turn of a loop that does what a simulator of this kind does, and will never change."""
    turns = 30_000
    heap: list[tuple[int, int, StepsDone]] = []
    held: dict[int, list[int]] = {}
    at = 0
    began = time.thread_time()
    for turn in range(turns):
        at = (at * 1_103_515_245 + 12_345) % 2_147_483_648
        heappush(heap, (at, turn, StepsDone(turn, 1, (turn,))))
        held[turn] = [at, 0]
        if len(heap) > 64:
            _, _, event = heappop(heap)
            for request in event.stopped:
                entry = held.pop(request)
                entry[1] += event.steps
    return (time.thread_time() - began) / turns


def is_compiled() -> bool:
    return Path(driver.__file__).suffix != ".py"


def measure(given: Case, repeats: int) -> float:
    """Print the line of a case; returns CPU seconds a request."""
    assert given.config.workload is not None
    requests = build(given.config.workload, 0, ROOT, given.config.replica.block_size)
    times, units = [], []
    for _ in range(repeats):
        units.append(unit_s())
        record, seconds = play(given.config, requests)
        times.append(seconds)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    spent, count = median(times), len(requests)
    preemptions = sum(row.preemptions for row in record.requests)
    vidur, goal = (f"{figure:,}" if figure else "-" for figure in (given.vidur, given.goal))
    cost = spent / count / median(units)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{given.name:41} {count:9,} {spent:8.3f} {count / spent:10,.0f} {goal:>7} {vidur:>6} {cost:7.1f} "
        f"{record.num_steps:11,} {record.num_events / count:6.1f} {preemptions:6,} {memory:6,}",
        flush=True,
    )
    return spent / count


def measure_steps(given: Case, repeats: int) -> None:
    """How much longer a run takes that also writes every step: workload, simulation and run directory, side by side."""
    times: tuple[list[float], list[float]] = [], []
    with TemporaryDirectory() as folder:
        for i in range(repeats):
            for writes, spent in enumerate(times):
                wanted = replace(given.config, run=Run(steps=bool(writes)))
                began = time.thread_time()
                record = rehearse(wanted)
                on = None if record.observed is None else deployed(wanted)
                write_run(Path(folder) / f"run{i}-{writes}", record, wanted, usd_per_gpu_hour(wanted), None, on)
                spent.append(time.thread_time() - began)
    plain, stepwise = map(median, times)
    print(f"{given.name}: {stepwise / plain:.2f} times as long where every step is written, too (goal: 2 at most)")


def measure_command(config: Config, repeats: int) -> None:
    """`squall simulate` from start to end, run directory included, on modules that were imported before, as they usually were."""
    times = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(dumps(config))
        for i in range(repeats + 1):
            began = time.perf_counter()
            command = [sys.executable, "-m", "squall", "simulate", str(path), "--out", f"{folder}/run{i}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            times.append(time.perf_counter() - began)
    del times[0]  # the one that leaves the bytecode
    print(f"the first case as a command, start-up included: {median(times):.2f} s wall (goal 0.5; Vidur 18, or 2,600 untrained)")


def main() -> None:
    smoke = "--smoke" in sys.argv
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    wanted: Callable[[Case], bool] = lambda given: not names or any(name in given.name for name in names)  # noqa: E731
    lengths = TRACE.name if TRACE.is_file() else "log-normal (no trace beside the checkout)"
    print(f"lengths: {lengths}; squall is {'compiled' if is_compiled() else 'plain Python (make fast compiles it)'}")
    columns = ("case", "requests", "CPU s", "requests/s", "goal", "Vidur", "units/r", "steps", "ev/r", "preem.", "MB")
    print("{:41} {:>9} {:>8} {:>10} {:>7} {:>6} {:>7} {:>11} {:>6} {:>6} {:>6}".format(*columns))
    spent = {
        given.name: measure(given, 1 if smoke else given.repeats)
        for given in cases(32 if smoke else 1, "--all" in sys.argv)
        if wanted(given)
    }
    if "the same: a million" in spent and (few := spent.get("1,000 replicas, 60 % load: ten thousand")):
        print(f"a request of the million costs {spent['the same: a million'] / few:.2f} times one of ten thousand (goal: 1.5)")
    if not names:
        measure_command(cases(1, million=False)[0].config, 1 if smoke else 5)
        everything = cases(32 if smoke else 1, million=False)
        for given in (everything[2], everything[-1]):
            measure_steps(given, 1 if smoke else 5)


if __name__ == "__main__":
    main()
