"""Vidur's per-request metrics, by Vidur's names and definitions, for comparison with its `request_metrics.csv`.

The definitions were read from Vidur (commit 7d47513) and are set beside ours in docs/metrics.md. Seconds; not a number where a
request has none. Knows no files and nothing of how times came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.core.metrics import UNSET, Observed, Outcome, RequestRow
from squall.core.types import SECOND

Floats = NDArray[np.float64]


class Lives(Struct, frozen=True):
    """What Vidur's definitions rest on: one element a request, in the order of arrival. Instants and times in seconds.

    Attributes:
        execution: of all stages of all steps that worked on it, together.
        away: from the end of a stage that worked on it to the start of the next, together.
        num_prefill_tokens, num_decode_tokens: when it arrived.
        prefill, decode: the same at the end; a restart makes what was generated part of the prompt.
        restarts: how often it lost its KV.
    """

    arrived_at: Floats
    scheduled_at: Floats
    prefilled_at: Floats
    completed_at: Floats
    execution: Floats
    away: Floats
    num_prefill_tokens: Floats
    num_decode_tokens: Floats
    prefill: Floats
    decode: Floats
    restarts: Floats


def request_metrics(lives: Lives) -> dict[str, Floats]:
    """The columns of `request_metrics.csv`, in its order, without the id."""
    e2e = lives.completed_at - lives.arrived_at
    running = lives.completed_at - lives.scheduled_at
    prefilling = lives.prefilled_at - lives.scheduled_at
    return {
        "request_e2e_time": e2e,
        "request_e2e_time_normalized": e2e / lives.decode,
        "request_execution_time": lives.execution,
        "request_execution_time_normalized": lives.execution / lives.decode,
        "request_model_execution_time": lives.execution,  # there is no CPU overhead to leave out unless it is modelled
        "request_model_execution_time_normalized": lives.execution / lives.decode,
        "request_preemption_time": lives.away,
        "request_scheduling_delay": lives.scheduled_at - lives.arrived_at,
        "request_execution_plus_preemption_time": lives.execution + lives.away,
        "request_execution_plus_preemption_time_normalized": (lives.execution + lives.away) / lives.decode,
        "prefill_e2e_time": lives.prefilled_at - lives.arrived_at,
        "prefill_time_execution_plus_preemption": prefilling,
        "prefill_time_execution_plus_preemption_normalized": prefilling / lives.prefill,
        "decode_time_execution_plus_preemption_normalized": (running - prefilling) / lives.decode,
        "request_inter_arrival_delay": np.diff(lives.arrived_at, prepend=np.nan),
        "request_num_tokens": lives.num_prefill_tokens + lives.num_decode_tokens,
        "request_num_prefill_tokens": lives.num_prefill_tokens,
        "request_num_decode_tokens": lives.num_decode_tokens,
        "request_pd_ratio": lives.num_prefill_tokens / lives.num_decode_tokens,
        "request_num_restarts": lives.restarts,
    }


def lives_of(rows: Sequence[RequestRow], observed: Observed) -> tuple[NDArray[np.int64], Lives]:
    """Ids and lives of the requests of an observed run, in the order of arrival. Instants that never came are not numbers."""
    rows = sorted(rows, key=lambda row: (row.arrived_at, row.id))
    arrived, scheduled, first, finished = (
        _seconds([getattr(row, name) for row in rows]) for name in ("arrived_at", "scheduled_at", "first_token_at", "finished_at")
    )
    completed = np.where([row.outcome is Outcome.COMPLETED for row in rows], finished, np.nan)
    execution = _seconds([observed.execution.get(row.id, UNSET) for row in rows])
    spent = observed.execution
    away = np.array([row.finished_at - row.scheduled_at - spent.get(row.id, 0) for row in rows], dtype=np.int64)
    prompt = np.array([row.num_prompt_tokens for row in rows], dtype=np.float64)
    output = np.array([row.num_output_tokens or np.nan for row in rows], dtype=np.float64)
    again = np.array([observed.regenerated.get(row.id, 0) for row in rows], dtype=np.float64)
    return np.array([row.id for row in rows], dtype=np.int64), Lives(
        arrived_at=arrived,
        scheduled_at=scheduled,
        prefilled_at=first,
        completed_at=completed,
        execution=np.where(np.isnan(completed), np.nan, execution),
        away=np.where(np.isnan(completed), np.nan, away / SECOND),
        num_prefill_tokens=prompt,
        num_decode_tokens=output,
        prefill=prompt + again,
        decode=output - again,
        restarts=np.array([row.preemptions for row in rows], dtype=np.float64),
    )


def _seconds(nanos: Sequence[int]) -> Floats:
    column = np.array(nanos, dtype=np.int64)
    seconds: Floats = np.where(column == UNSET, np.nan, column / SECOND)
    return seconds
