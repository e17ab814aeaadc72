"""Models of any shape on one cluster where all breaks: no GPU is two fleets', everybody ends, each log is whole by itself."""

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from squall import config as configuration
from squall.config import Config
from squall.core.metrics import GpuLevel, Outcome, RunRecord
from squall.eventlog import EventLog, read
from squall.twin.observe import observe
from squall.twin.together import rehearse_together

LOADS = (
    "{kind='auto', live=true}", "{kind='chain'}", "{kind='p2p'}", "{kind='host', cache='lru'}", "{kind='disk'}", "{kind='host'}",
    "{kind='striped', live=true}",
)  # fmt: skip


def fleet(rng: Random, tp: int, slots: int) -> list[str]:
    least = rng.choice([0, 0, 1])
    if rng.random() < 0.3 and slots >= 3:
        bounds = f"{{min={least}, max={slots // 2}, initial=1}}"
        return ["fleet.mode=disaggregated", f"fleet.prefill={bounds}", f"fleet.decode={bounds}", f"replica.tp={tp}"]
    moves = ["fleet.drain=move"] if rng.random() < 0.3 else []
    return [f"fleet.replicas={{min={least}, max={slots}, initial={rng.choice([least, 1])}}}", f"replica.tp={tp}", *moves]


def case(seed: int) -> list[Config]:
    """Two or three models of one seed."""
    rng = Random(f"together {seed}")
    nodes, on_node = rng.choice([(1, 4), (2, 4), (3, 2), (2, 8)])
    common = [
        f"cluster.gpu={rng.choice(['a100-80g', 'a40', 'h100-sxm'])}",
        f"cluster.nodes={nodes}",
        f"cluster.gpus_per_node={on_node}",
        f"hazards.node_per_hour={rng.choice([0, 0, 40])}",
        "hazards.node_back_s=20",
        f"hazards.notice_s={rng.choice([0, 5])}",
    ]
    configs = []
    for number in range(rng.choice([2, 2, 3])):
        tp = rng.choice([1, 1, 2])
        scale = rng.choice(["{kind='concurrency'}", "{kind='ttft', ttft_s=0.5}", "{kind='blitz'}"])
        arrivals = f"{{kind='mmpp', rates_rps=[{rng.choice([1, 5])}, {rng.choice([20, 40])}], mean_stay_s=[5, 5]}}"
        lengths = "prompt={kind='uniform', low=50, high=2000}, output={kind='uniform', low=1, high=100}"
        configs.append(
            configuration.load(
                None,
                [
                    *common,
                    *fleet(rng, tp, nodes * (on_node // tp)),
                    f"model.name={rng.choice(['llama-3-8b', 'qwen/qwen2.5-7b-instruct'])}",
                    f"model.served_as=['m{number}']",
                    f"run.seed={rng.randrange(99)}",
                    f"fleet.down_window_s={rng.choice([0.5, 3])}",
                    f"fleet.idle_ttl_s={rng.choice([0.1, 2])}",
                    f"fleet.up_interval_s={rng.choice([0.1, 1])}",
                    f"scale={scale}",
                    f"load={rng.choice(LOADS)}",
                    f"hazards.replica_per_hour={rng.choice([0, 0, 300])}",
                    f"startup.process_s={rng.choice([0, 1])}",
                    f"startup.stop_s={rng.choice([0, 0.5])}",
                    f"workload={{kind='synthetic', duration_s=15, arrivals={arrivals}, {lengths}}}",
                ],
            )
        )
    return configs


def levels(record: RunRecord) -> Sequence[GpuLevel]:
    assert record.fleet is not None
    return record.fleet.gpus


def play(seed: int, folder: Path) -> None:
    configs = case(seed)
    cluster = configs[0].cluster
    files = [io.BytesIO() for _ in configs]
    logs = [EventLog(file) for file in files]
    records = rehearse_together(configs, [f"m{number}.toml" for number in range(len(configs))], [[log] for log in logs])
    held = [0] * len(records)
    changes = sorted((level.at, number, level.held) for number, record in enumerate(records) for level in levels(record))
    for index, (at, number, count) in enumerate(changes):
        held[number] = count
        if index + 1 == len(changes) or changes[index + 1][0] > at:
            assert sum(held) <= cluster.nodes * cluster.gpus_per_node, f"seed {seed} at {at}"
    for record, log, file in zip(records, logs, files, strict=True):
        ends = [*(level.at for level in levels(record)[1:]), record.ended_at]
        spent = sum(level.held * (end - level.at) for level, end in zip(levels(record), ends, strict=True))
        assert spent == record.gpu_nanos, f"seed {seed}"
        assert {row.outcome for row in record.requests} <= {Outcome.COMPLETED, Outcome.REJECTED, Outcome.FAILED}, f"seed {seed}"
        log.flush()
        (folder / "log").write_bytes(file.getvalue())
        seen = observe(read(folder / "log"))
        assert seen.exact, f"seed {seed}: {seen.mismatches[0]}"


@pytest.mark.parametrize("seed", range(6))
def test_a_few_clusters_on_which_anything_may_happen(seed: int, tmp_path: Path) -> None:
    play(seed, tmp_path)
