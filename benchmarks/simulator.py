"""How many requests a second of CPU the simulator serves. Target: at least 30,000 on one core for the first case, compiled.

    python benchmarks/simulator.py [--smoke]

The first case is 512 conversation requests, Llama-3-8B on one A100, Poisson arrivals at 6.45/s; the second 20,000 over 16 such
replicas. Lengths come from Azure's conversation trace of 2023 where it lies beside the checkout (or under $SQUALL_SHARED), and
otherwise from log-normal distributions with about its medians. Times are CPU seconds of the simulating thread (numpy's idle ones
spin at times), the median of several runs, and cover the simulation itself: machines, world and driver. The last line is a
whole command with its start-up, in wall time.

`make fast` compiles the modules that every event passes (tools/compile.py); the first line of the table says which were measured.
What was tried on the first case, on two busy cores; best of many runs, taken by turns with each other:

    mypyc over those modules                         18,500 -> 31,500 requests/s
    prices: what no batch changes worked out once    these three: nothing in plain Python that can be told from noise,
    ranks asked for when a replica is wanted         31,500 -> 37,000 compiled, where the policies and the roofline are what
    constants `Final`, priorities plain integers     is still interpreted
    the garbage collector off                        nothing: most of what lives for a moment here is not tracked by it
    tokens rounded up to a multiple of 8             not done: 512 requests would still meet half of the prices for the first
                                                     time, and a miss has become cheap

What is left in plain Python are 3,700 bytecodes a request, for 5.7 events and 2.2 runs of steps.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from squall.config import Cluster, Config, Fleet, Model, dumps
from squall.core.metrics import Outcome, RunRecord
from squall.perf.build import latency_model, num_blocks
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.batching import Batching, Vllm
from squall.sim import driver
from squall.sim.run import simulate
from squall.workload.build import build
from squall.workload.spec import LogNormalLength, OfferedRequest, PoissonArrivals, SyntheticWorkload, TraceWorkload, Workload

ROOT = Path(__file__).resolve().parents[1]
TRACE = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared")) / "data" / "traces" / "azure2023_conv.csv"


def workload(num_requests: int, rate_rps: float) -> Workload:
    if TRACE.is_file():
        return TraceWorkload(path=str(TRACE), arrivals=PoissonArrivals(rate_rps), max_requests=num_requests)
    prompt, output = LogNormalLength(1020, 1.1, 1, 7_000), LogNormalLength(129, 1.0, 1, 1_000)
    return SyntheticWorkload(PoissonArrivals(rate_rps), prompt, output, num_requests)


def case(num_requests: int, replicas: int, rate_rps: float, batching: Batching) -> Config:
    return Config(
        model=Model("llama-3-8b"),
        cluster=Cluster(gpu="a100-80g"),
        fleet=Fleet(replicas=replicas),
        batching=batching,
        workload=workload(num_requests, rate_rps),
    )


def play(config: Config, requests: list[OfferedRequest]) -> tuple[RunRecord, float]:
    """One simulation, and its CPU seconds."""
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    latency = latency_model(config.latency, model, gpu, config.replica)
    batch = config.batching
    blocks = num_blocks(
        model, gpu, config.replica, max_num_batched_tokens=batch.max_num_batched_tokens, max_num_seqs=batch.max_num_seqs
    )
    began = time.thread_time()
    record = simulate(config, requests, latency, blocks)
    return record, time.thread_time() - began


def is_compiled() -> bool:
    return Path(driver.__file__).suffix != ".py"


def measure(name: str, config: Config, repeats: int) -> None:
    assert config.workload is not None
    requests = build(config.workload, 0, ROOT)
    times = []
    for _ in range(repeats):
        record, seconds = play(config, requests)
        times.append(seconds)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    spent = median(times)
    preemptions = sum(row.preemptions for row in record.requests)
    print(
        f"{name:44} {len(requests):9,} {spent:9.3f} {len(requests) / spent:11,.0f} {record.num_steps:11,} "
        f"{record.num_events / len(requests):10.1f} {preemptions:11,}"
    )


def measure_command(config: Config, repeats: int) -> None:
    """`squall simulate` from start to end, run directory included."""
    times = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(dumps(config))
        for i in range(repeats):
            began = time.perf_counter()
            command = [sys.executable, "-m", "squall", "simulate", str(path), "--out", f"{folder}/run{i}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
    print(f"the first case as a command, start-up included: {median(times):.2f} s wall (target: under 1 s)")


def main() -> None:
    smoke = "--smoke" in sys.argv
    small, large, repeats = (64, 320, 1) if smoke else (512, 20_000, 5)
    readme = case(small, 1, 6.45, Vllm())
    lengths = TRACE.name if TRACE.is_file() else "log-normal (no trace beside the checkout)"
    print(f"lengths: {lengths}; squall is {'compiled' if is_compiled() else 'plain Python (make fast compiles it)'}")
    columns = ("case", "requests", "CPU s", "requests/s", "steps", "events/req", "preemptions")
    print("{:44} {:>9} {:>9} {:>11} {:>11} {:>10} {:>11}".format(*columns))
    measure("Llama-3-8B, one A100, 6.45/s", readme, repeats * (1 if smoke else 5))
    measure("the same, token budget 512", case(small, 1, 6.45, Vllm(max_num_batched_tokens=512)), repeats)
    measure("16 replicas, 80/s", case(large, 16, 80.0, Vllm()), repeats)
    measure_command(readme, 1 if smoke else 5)


if __name__ == "__main__":
    main()
