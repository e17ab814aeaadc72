"""From the `[workload]` table to the requests it stands for. Knows no clock: arrivals are instants from 0."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from msgspec import structs

from squall.core.types import SECOND, BlockHash, Nanos
from squall.errors import ConfigError, TraceError
from squall.workload.generators import LATEST_S, draw_arrivals, draw_lengths
from squall.workload.named import doubt, resolve
from squall.workload.prefixes import named_block_hashes, segment_hashes
from squall.workload.servegen import draw_client, is_client
from squall.workload.sessions import draw_sessions, recorded_contents, waiting_turns
from squall.workload.spec import (
    ClosedLoop,
    NamedWorkload,
    OfferedRequest,
    SessionsWorkload,
    SyntheticWorkload,
    TraceWorkload,
    Workload,
)
from squall.workload.traces import Trace, read_trace
from squall.workload.turns import Turns

_log = logging.getLogger(__name__)

Hashes = Sequence[tuple[BlockHash, ...]]


def build(
    workload: Workload, seed: int, base_dir: Path, block_size: int = 16, *, honours_after: bool = False
) -> list[OfferedRequest]:
    """The requests in order of arrival, with ids from 0. The same arguments always make the same requests.

    Args:
        seed: of everything that is drawn.
        base_dir: where relative paths start.
        block_size: tokens in a KV block of the replicas; what is known of the prompts is hashed in such blocks.
        honours_after: the caller lets requests with `OfferedRequest.after` wait. Who does not say so gets none: played without
            waiting, they would be another workload.

    What had to be put right in a trace is logged as a warning. Raises ConfigError (TraceError for the file itself), also when no
    request is left.
    """
    if isinstance(workload, NamedWorkload):
        meant, said = resolve(workload)
        requests = build(meant, seed, base_dir, block_size, honours_after=honours_after)
        if said or (said := doubt(workload, len(requests))):
            _log.warning("%s", said)
        return requests
    if isinstance(workload, SessionsWorkload):
        requests = draw_sessions(workload, seed, base_dir, block_size)
    elif isinstance(workload, TraceWorkload):
        requests = _from_trace(workload, seed, base_dir, block_size)
    else:
        requests = _synthetic(workload, seed, base_dir)
    if not honours_after and any(request.after >= 0 for request in requests):
        raise ConfigError(f"workload: {_waiting(workload)}, but no replay can play requests that wait for answers yet")
    return requests


def _waiting(workload: TraceWorkload | SyntheticWorkload | SessionsWorkload) -> str:
    """What makes requests wait, and what to say instead."""
    if isinstance(workload.arrivals, ClosedLoop):
        return 'arrivals.kind is "closed_loop" (use another one)'
    return "waits is true (use false)" if isinstance(workload, SessionsWorkload) else 'turns is "wait" (use "recorded")'


# -- generated


def _synthetic(workload: SyntheticWorkload, seed: int, base_dir: Path) -> list[OfferedRequest]:
    if isinstance(workload.arrivals, ClosedLoop):
        if workload.duration_s is not None:
            raise ConfigError("workload.duration_s means nothing in a closed loop, which ends after num_requests; leave it out")
        loop, times = workload.arrivals, [0] * (workload.num_requests or 0)
    else:
        loop, times = None, draw_arrivals(workload.arrivals, seed, workload.num_requests, workload.duration_s, base_dir)
    if not times:
        raise ConfigError(f"workload: no request arrives within duration_s = {workload.duration_s}; raise it or the rate")
    prompts = draw_lengths(workload.prompt, seed, "prompt", len(times), base_dir)
    outputs = draw_lengths(workload.output, seed, "output", len(times), base_dir)
    most = workload.max_total_tokens
    if most is not None:
        outputs = [min(output, most - 1) for output in outputs]
        prompts = [min(prompt, most - output) for prompt, output in zip(prompts, outputs, strict=True)]
    return _looped(loop, prompts, outputs) if loop else _requests(times, prompts, outputs)


def _looped(
    loop: ClosedLoop, prompts: Sequence[int], outputs: Sequence[int], hashes: Hashes = (), sessions: Sequence[int] = ()
) -> list[OfferedRequest]:
    """Client n of the loop has requests n, n + concurrency, ..."""
    think = round(loop.think_s * SECOND)
    places = range(len(prompts))
    times = [place // loop.concurrency * think for place in places]
    afters = [place - loop.concurrency if place >= loop.concurrency else -1 for place in places]
    return _requests(times, prompts, outputs, hashes, sessions, afters, [think if after >= 0 else 0 for after in afters])


def _requests(
    times: Sequence[Nanos],
    prompts: Sequence[int],
    outputs: Sequence[int],
    hashes: Hashes = (),
    sessions: Sequence[int] = (),
    afters: Sequence[int] = (),
    thinks: Sequence[Nanos] = (),
    output_hashes: Hashes = (),
) -> list[OfferedRequest]:
    """Columns that are empty say nothing of any request."""
    columns = (
        hashes or repeat(()),
        sessions or repeat(0),
        afters or repeat(-1),
        thinks or repeat(0),
        output_hashes or repeat(()),
    )
    rows = zip(range(len(times)), times, prompts, outputs, *columns, strict=False)
    return [OfferedRequest(*row) for row in rows]


# -- recorded


def _from_trace(workload: TraceWorkload, seed: int, base_dir: Path, block_size: int) -> list[OfferedRequest]:
    path = base_dir / workload.path
    trace = _read(workload, seed, path)
    for note in trace.notes:
        _log.warning("%s", note)
    trace = _windowed(workload, trace, path)
    prompts, outputs = trace.num_prompt_tokens, trace.num_output_tokens
    if trace.blocks and trace.block_size != block_size:
        _log.warning("%s: blocks of %d tokens are hashed as blocks of %d", path, trace.block_size, block_size)
    sessions = trace.turns.sessions
    hashes: Hashes = ()
    output_hashes: Hashes = ()
    if trace.blocks:
        hashes = named_block_hashes(trace.blocks, trace.block_size, prompts, block_size)
    elif sessions:
        texts = [segment_hashes(content, block_size) for content in recorded_contents(trace.turns, prompts, outputs)]
        hashes = [text[: prompt // block_size] for text, prompt in zip(texts, prompts, strict=True)]
        output_hashes = [text[prompt // block_size :] for text, prompt in zip(texts, prompts, strict=True)]
    if isinstance(workload.arrivals, ClosedLoop):
        if workload.rate_scale != 1:
            raise ConfigError("workload.rate_scale means nothing in a closed loop; set arrivals.concurrency")
        return _looped(workload.arrivals, prompts, outputs, hashes, sessions)
    times = _times(workload, seed, trace, path, base_dir)
    requests = _requests(times, prompts, outputs, hashes, sessions, output_hashes=output_hashes)
    if workload.turns == "recorded":
        return requests
    if not sessions or trace.arrived_at is None:
        raise TraceError(f'{path}: has no conversations, so turns = "wait" means nothing; leave it out')
    return waiting_turns(requests, trace.turns, trace.arrived_at, workload.recorded_tbt_s)


def _read(workload: TraceWorkload, seed: int, path: Path) -> Trace:
    if workload.format == "servegen" or (workload.format == "auto" and is_client(path)):
        return draw_client(path, seed, workload.start_s, workload.duration_s, workload.max_requests)
    return read_trace(path, workload.format, time_unit=workload.time_unit, block_size=workload.trace_block_size)


def _windowed(workload: TraceWorkload, trace: Trace, path: Path) -> Trace:
    """The rows that are kept; their times count from `start_s`."""
    first, end = 0, len(trace.num_prompt_tokens)
    start = round(workload.start_s * SECOND)
    if trace.arrived_at is not None:
        stop = None if workload.duration_s is None else start + round(workload.duration_s * SECOND)
        first = bisect_left(trace.arrived_at, start)
        end = end if stop is None else bisect_left(trace.arrived_at, stop)
    elif workload.start_s or workload.duration_s is not None:
        raise TraceError(f"{path}: has no arrival times for workload.start_s and duration_s to choose from; use max_requests")
    end = end if workload.max_requests is None else min(end, first + workload.max_requests)
    if first >= end:
        raise ConfigError(f"workload: no request of {path} arrives in the window; change workload.start_s or duration_s")
    turns = trace.turns
    return structs.replace(
        trace,
        arrived_at=None if trace.arrived_at is None else [time - start for time in trace.arrived_at[first:end]],
        num_prompt_tokens=trace.num_prompt_tokens[first:end],
        num_output_tokens=trace.num_output_tokens[first:end],
        blocks=trace.blocks[first:end],
        turns=Turns(
            turns.sessions[first:end],
            [parent - first if first <= parent < end else -1 for parent in turns.parents[first:end]],
            turns.shared[first:end],
        ),
    )


def _times(workload: TraceWorkload, seed: int, trace: Trace, path: Path, base_dir: Path) -> list[Nanos]:
    """Arrivals of the kept rows: generated ones where the workload says so, the trace's own otherwise, both scaled."""
    if workload.arrivals is not None and not isinstance(workload.arrivals, ClosedLoop):
        times = draw_arrivals(workload.arrivals, seed, len(trace.num_prompt_tokens), None, base_dir)
        if not times:
            raise ConfigError("workload: workload.arrivals end before the first request")
    elif trace.arrived_at is not None:
        times = trace.arrived_at
    else:
        raise TraceError(f"{path}: has no arrival times; give them with [workload.arrivals]")
    if workload.rate_scale == 1:
        return times
    if times[-1] / workload.rate_scale > LATEST_S * SECOND:
        raise TraceError(f"{path}: with workload.rate_scale = {workload.rate_scale:g} the last arrives after 285 years; raise it")
    return [round(time / workload.rate_scale) for time in times]
