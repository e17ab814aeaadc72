"""A run as a timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing: `trace.json`.

Every replica is a process with a thread a pipeline stage, on which its runs of steps lie (a run of k steps is one slice); every
request is an asynchronous span with its queue, prefill and decode inside. At most `MOST_EVENTS` events are written, from
`from_s` on in order of time; what the file leaves out is said in it. The format is Chrome's Trace Event Format, whose instants
are microseconds. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

from squall.core.metrics import UNSET, Observed, RequestRow, RunRecord
from squall.core.types import SECOND, Nanos
from squall.report.steps import Stretches

MOST_EVENTS = 400_000
"""Some eighty megabytes: about what these viewers open without trouble."""

REQUESTS = 1_000_000
"""The process that stands for the clients; replicas have their own numbers."""

TraceEvent = dict[str, Any]


def trace(record: RunRecord, observed: Observed, from_s: float = 0.0, most_events: int = MOST_EVENTS) -> bytes:
    """The timeline of an observed run, as JSON."""
    begin = round(from_s * SECOND)
    limit = most_events + 1  # of each kind, since each is in order of time
    kept = list(islice(_requests(record.requests, begin), limit))
    kept += islice(_runs(observed, begin, most_events), limit)
    kept += islice(_phases(observed, begin), limit)
    kept.sort(key=itemgetter("ts"))
    cut = len(kept) > most_events
    if cut:
        kept = _closed(kept[:most_events])
    until = kept[-1]["ts"] / 1e6 if cut and kept else record.ended_at / SECOND
    about = {"world": record.world, "times": record.latency_source, "from_s": from_s, "until_s": until, "complete": not cut}
    names = _names(observed)
    return msgspec.json.encode({"traceEvents": [*names, *kept], "displayTimeUnit": "ms", "otherData": about})


def _names(observed: Observed) -> list[TraceEvent]:
    """What the viewer calls processes and threads, and their order."""
    events = [_meta("process_name", REQUESTS, 0, name="requests"), _meta("process_sort_index", REQUESTS, 0, sort_index=-1)]
    for replica in sorted(observed.pools):
        stages = observed.stages.get(replica, observed.num_stages)
        events.append(_meta("process_name", replica, 0, name=f"replica {replica}"))
        events += [_meta("thread_name", replica, stage, name=f"stage {stage}") for stage in range(stages)]
    return events


def _meta(what: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _runs(observed: Observed, begin: Nanos, most: int) -> Iterator[TraceEvent]:
    """A slice for every stretch of steps, and the KV blocks that each replica holds as a counter beside it."""
    stretches = Stretches(observed)
    durations = stretches.durations()
    columns = stretches.columns
    order = np.argsort(columns["started_at"], kind="stable")
    order = order[(columns["started_at"] + durations)[order] > begin][: most + 1]
    names = (
        "replica", "stage", "run", "started_at", "count", "num_decodes", "decode_context", "num_prefills", "num_prefill_tokens",
        "kv_blocks",
    )  # fmt: skip
    rows = zip(*(columns[name][order].tolist() for name in names), durations[order].tolist(), strict=True)
    for replica, stage, run, at, steps, decodes, context, prefills, tokens, blocks, took in rows:
        yield {
            "ph": "X", "name": _what(decodes, prefills), "cat": "run", "pid": replica, "tid": stage,
            "ts": at / 1e3, "dur": took / 1e3,
            "args": {
                "run": run, "steps": steps, "decodes": decodes, "decode_context": context, "prefills": prefills,
                "prefill_tokens": tokens,
            },
        }  # fmt: skip
        if stage == 0:
            yield {"ph": "C", "name": "KV blocks", "pid": replica, "ts": at / 1e3, "args": {"held": blocks}}


def _what(decodes: int, prefills: int) -> str:
    if decodes and prefills:
        return "mixed"
    return "decode" if decodes else "prefill"


def _phases(observed: Observed, begin: Nanos) -> Iterator[TraceEvent]:
    """The lives of replicas, as marks."""
    for at, replica, phase, role in observed.phases:
        if at >= begin:
            yield {
                "ph": "i",
                "name": phase,
                "cat": "phase",
                "s": "p",
                "pid": replica,
                "tid": 0,
                "ts": at / 1e3,
                "args": {"role": role},
            }


def _requests(rows: Iterable[RequestRow], begin: Nanos) -> Iterator[TraceEvent]:
    """Beginnings and ends of the requests' spans, in order of time; of those that end after `begin`."""
    late = [row for row in rows if row.finished_at == UNSET or row.finished_at >= begin]
    pending: list[tuple[Nanos, int, int, int, TraceEvent]] = []  # of requests that have arrived
    for row in sorted(late, key=attrgetter("arrived_at", "id")):
        while pending and pending[0][0] < row.arrived_at:
            yield heappop(pending)[-1]
        for number, (at, order, event) in enumerate(_spans(row)):
            heappush(pending, (at, order, row.id, number, event))
    while pending:
        yield heappop(pending)[-1]


def _spans(row: RequestRow) -> Iterator[tuple[Nanos, int, TraceEvent]]:
    """Instants and their order within them: inner spans end, then outer ones, and outer ones begin before inner ones."""
    arrived, scheduled, first, ended = row.arrived_at, row.scheduled_at, row.first_token_at, row.finished_at
    args = {
        "prompt": row.num_prompt_tokens, "output": row.num_output_tokens, "cached": row.num_cached_tokens, "replica": row.replica,
        "preemptions": row.preemptions, "outcome": row.outcome.value,
    }  # fmt: skip
    yield arrived, 2, _span(row, "b", f"request {row.id}", arrived, args)
    for name, began, stopped in (("queue", arrived, scheduled), ("prefill", scheduled, first), ("decode", first, ended)):
        until = ended if stopped == UNSET else stopped
        if began in (UNSET, until):
            continue
        yield began, 3, _span(row, "b", name, began)
        if until != UNSET:
            yield until, 0, _span(row, "e", name, until)
    if ended != UNSET:
        yield ended, 1 if ended > arrived else 4, _span(row, "e", f"request {row.id}", ended)


def _span(row: RequestRow, kind: str, name: str, at: Nanos, args: dict[str, Any] | None = None) -> TraceEvent:
    event: TraceEvent = {"ph": kind, "cat": "request", "name": name, "id": row.id, "pid": REQUESTS, "tid": 0, "ts": at / 1e3}
    if args is not None:
        event["args"] = args
    return event


def _closed(events: list[TraceEvent]) -> list[TraceEvent]:
    """Ends what is still open where the trace was cut, so that no viewer draws it to infinity."""
    open_spans: dict[tuple[int, str], TraceEvent] = {}
    for event in events:
        if event["ph"] == "b":
            open_spans[event["id"], event["name"]] = event
        elif event["ph"] == "e":
            open_spans.pop((event["id"], event["name"]), None)
    last = events[-1]["ts"] if events else 0
    return events + [{**event, "ph": "e", "ts": last} for event in reversed(open_spans.values())]
