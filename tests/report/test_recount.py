"""A simulation's event log, counted again, says of every request what the simulation itself has recorded."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from squall.config import load
from squall.core.actions import RunSteps
from squall.core.events import Arrived, Cancelled, Progressed, StepsDone, Submitted
from squall.core.metrics import Outcome, RequestRow
from squall.core.types import ROUTER, Request
from squall.eventlog import Record, read
from squall.report.recount import Recounted, recount
from squall.twin.rehearse import rehearse_with_events

BUSY = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "workload.kind=synthetic",
    "workload.num_requests=60",
    "workload.arrivals={kind='poisson', rate_rps=20.0}",
    "workload.prompt={kind='uniform', low=50, high=3000}",
    "workload.output={kind='uniform', low=1, high=80}",
)
TIGHT = ("replica.num_blocks=300", "workload.output={kind='uniform', low=100, high=600}")
ELASTIC = ("fleet.replicas={min=1, max=4}", "scale={kind='ttft', ttft_s=0.5}", "fleet.down_window_s=1", "cluster.ssd_gbps=800")


def again(records: Sequence[Record], dilation: float = 1.0) -> Recounted:
    return recount(records, "real", "measured by the fleet", dilation)


@pytest.mark.parametrize(
    "settings",
    [
        *(
            (f"batching.kind={kind}", "fleet.replicas=2")
            for kind in ("vllm", "vllm_v0", "sarathi", "orca", "lightllm", "faster_transformer")
        ),
        (*TIGHT, "batching.kind=vllm_v0"),
        (*TIGHT, "batching={kind='vllm_v0', preemption='swap', swap_blocks=1000}"),
        ("fleet.mode=disaggregated", "fleet.prefill=1", "fleet.decode=1"),
        ("hazards.replica_per_hour=600", "fleet.replicas=3", "queue.max_retries=100"),
        ELASTIC,
        (*ELASTIC, "load={kind='auto', live=true}", "batching.kind=blitz"),
    ],
    ids=lambda settings: " ".join(settings[:2]),
)
def test_every_request_is_as_it_was(settings: tuple[str, ...], tmp_path: Path) -> None:
    record, events = rehearse_with_events(load(None, [*BUSY, *settings]))
    (tmp_path / "log").write_bytes(events)
    found = again(list(read(tmp_path / "log")))
    assert found.record.requests == record.requests
    for name in ("num_events", "ended_at", "scale_ups", "scale_downs", "gpu_nanos"):
        assert getattr(found.record, name) == getattr(record, name), name
    assert found.num_uncounted == 0


def test_steps_are_those_of_all_runs_and_preemptions_of_all_requests(tmp_path: Path) -> None:
    record, events = rehearse_with_events(load(None, [*BUSY, *TIGHT]))
    (tmp_path / "log").write_bytes(events)
    found = again(list(read(tmp_path / "log"))).record
    assert sum(row.preemptions for row in found.requests) == sum(row.preemptions for row in record.requests) > 0
    assert found.num_steps == record.num_steps


REQUEST = Request(7, 1_010, 4, 16)
LOG = (
    Record(1_000, ROUTER),
    Record(1_020, ROUTER, Arrived(REQUEST)),
    Record(1_030, 0, Submitted(REQUEST), (RunSteps(1, 3, 1, 5),)),
    Record(1_060, ROUTER, Progressed(0, first=(7,))),
    Record(1_100, ROUTER, Progressed(0, finished=(7,))),
)


def test_instants_count_from_the_first_line_and_are_undilated() -> None:
    (row,) = again(LOG, dilation=2.0).record.requests
    assert row == RequestRow(7, 5, 4, first_token_at=30, finished_at=50, outcome=Outcome.COMPLETED)
    assert again(LOG, dilation=2.0).record.ended_at == 50


def test_who_ended_without_a_line_of_it_from_the_replica_is_told() -> None:
    assert again(LOG).num_uncounted == 1
    told = (*LOG[:3], Record(1_050, 0, StepsDone(1, 1, (7,))), *LOG[3:])
    assert again(told).num_uncounted == 0


def test_a_client_that_went_away_did_so_before_its_replica_ended_the_request() -> None:
    (row,) = again((*LOG[:4], Record(1_070, ROUTER, Cancelled(7)), LOG[4])).record.requests
    assert (row.outcome, row.finished_at) == (Outcome.CANCELLED, 70)


def test_a_request_goes_on_with_the_tokens_that_its_client_has() -> None:
    """Whatever the log of the lost replica says: its last lines may be missing."""
    continued = Submitted(Request(7, 1_010, 4, 16, num_output_tokens=9))
    (row,) = again((*LOG[:4], Record(1_080, 1, continued))).record.requests
    assert (row.num_output_tokens, row.outcome) == (9, Outcome.UNFINISHED)
