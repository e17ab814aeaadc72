"""From the `[workload]` table to the requests it stands for. Knows no clock: arrivals are instants from 0."""

import logging
from collections.abc import Sequence
from pathlib import Path

from squall.core.types import SECOND, Nanos
from squall.errors import ConfigError, TraceError
from squall.workload.generators import draw_arrivals, draw_lengths
from squall.workload.spec import OfferedRequest, SyntheticWorkload, TraceWorkload, Workload
from squall.workload.traces import Trace, read_trace

_log = logging.getLogger(__name__)


def build(workload: Workload, seed: int, base_dir: Path) -> list[OfferedRequest]:
    """The requests in order of arrival, with ids from 0. The same arguments always make the same requests.

    Relative paths start at `base_dir`. What had to be put right in a trace is logged as a warning. Raises ConfigError
    (TraceError for the file itself), also when no request is left.
    """
    if isinstance(workload, TraceWorkload):
        return _from_trace(workload, seed, base_dir)
    return _synthetic(workload, seed, base_dir)


def _synthetic(workload: SyntheticWorkload, seed: int, base_dir: Path) -> list[OfferedRequest]:
    times = draw_arrivals(workload.arrivals, seed, workload.num_requests, workload.duration_s)
    if not times:
        raise ConfigError(f"workload: no request arrives within duration_s = {workload.duration_s}; raise it or the rate")
    prompts = draw_lengths(workload.prompt, seed, "prompt", len(times), base_dir)
    outputs = draw_lengths(workload.output, seed, "output", len(times), base_dir)
    return _requests(times, prompts, outputs)


def _from_trace(workload: TraceWorkload, seed: int, base_dir: Path) -> list[OfferedRequest]:
    path = base_dir / workload.path
    trace = read_trace(path, workload.format)
    for note in trace.notes:
        _log.warning("%s", note)
    first, end = _window(workload, trace, path)
    if first == end:
        raise ConfigError(f"workload: no request of {path} arrives in the window; change workload.start_s or duration_s")
    times = _times(workload, seed, trace, path, first, end)
    return _requests(times, trace.num_prompt_tokens[first:end], trace.num_output_tokens[first:end])


def _window(workload: TraceWorkload, trace: Trace, path: Path) -> tuple[int, int]:
    """The first row that is kept and the first after it that is not."""
    first, end = 0, len(trace.num_prompt_tokens)
    if trace.arrived_at is not None:
        start = round(workload.start_s * SECOND)
        stop = None if workload.duration_s is None else start + round(workload.duration_s * SECOND)
        kept = [row for row, time in enumerate(trace.arrived_at) if time >= start and (stop is None or time < stop)]
        first, end = (kept[0], kept[-1] + 1) if kept else (0, 0)
    elif workload.start_s or workload.duration_s is not None:
        raise TraceError(f"{path}: has no arrival times for workload.start_s and duration_s to choose from; use max_requests")
    return (first, end) if workload.max_requests is None else (first, min(end, first + workload.max_requests))


def _times(workload: TraceWorkload, seed: int, trace: Trace, path: Path, first: int, end: int) -> list[Nanos]:
    """Arrivals of the kept rows: generated ones where the workload says so, the trace's own otherwise, both scaled."""
    if workload.arrivals is not None:
        times = draw_arrivals(workload.arrivals, seed, end - first, None)
    elif trace.arrived_at is not None:
        start = round(workload.start_s * SECOND)
        times = [time - start for time in trace.arrived_at[first:end]]
    else:
        raise TraceError(f"{path}: has no arrival times; give them with [workload.arrivals]")
    return times if workload.rate_scale == 1 else [round(time / workload.rate_scale) for time in times]


def _requests(times: Sequence[Nanos], prompts: Sequence[int], outputs: Sequence[int]) -> list[OfferedRequest]:
    rows = zip(times, prompts, outputs, strict=True)
    return [OfferedRequest(id, time, prompt, output) for id, (time, prompt, output) in enumerate(rows)]
