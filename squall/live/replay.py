"""An open-loop load generator for any OpenAI-compatible endpoint: a request leaves when it is due, whatever became of others.

    record = replay("http://localhost:8000", "smollm2", build(workload, seed, folder))

Knows the schedule and what a client can see: the instants at which chunks arrive. Does not know what serves it. All times are
seen from here, and a request's clock starts when it is due, so that a late client or a full connection pool cannot flatter the
server. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from squall.core.metrics import UNSET, Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import MILLISECOND, Nanos
from squall.errors import ConfigError
from squall.live.loop import run
from squall.live.replay_http import Client, EventParser, HttpFailed, parse_address
from squall.live.replay_prompts import Prompts, error_of, find_prompts
from squall.workload.spec import OfferedRequest

LATE: Nanos = 10 * MILLISECOND
"""A 99th percentile of lateness above this is worth a warning: the client is too busy for this load."""

REJECTIONS = ("context_length_exceeded", "rate_limit_exceeded", "no_capacity", "draining", "model_loading")

Progress = Callable[[int, int, int], None]
"""Told (done, in flight, failed) whenever one of them changes."""


class ReplayRecord(RunRecord):
    """What the run left behind, and how far the client itself can be trusted.

    Attributes:
        late_p99, late_max: how long after it was due a request left.
        early_stops: completed requests with fewer tokens than asked for.
        num_chunks, num_crowded_chunks: chunks with tokens, and those of them with more than one; a gap is between chunks.
        prompts: how prompts were written.
        not_sent: requests whose time had not come when the run was interrupted.
        warnings: one line each.
    """

    late_p99: Nanos = 0
    late_max: Nanos = 0
    early_stops: int = 0
    num_chunks: int = 0
    num_crowded_chunks: int = 0
    prompts: str = ""
    not_sent: int = 0
    warnings: list[str] = msgspec.field(default_factory=list)


class _Delta(Struct):
    role: str | None = None
    content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def num_tokens(self) -> int:
        """Tokens that this chunk carries; 1 where there is text and nobody says how many."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.delta is not None:
            is_opening = self.delta.role is not None and not self.delta.content
            return int(bool(self.delta.content) or (self.finish_reason is None and not is_opening))
        return int(bool(self.text) or self.finish_reason is None)


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class Watch:
    """One request in flight: stamps what arrives.

    Attributes:
        stamps: when each chunk with tokens came.
        num_tokens: in all of them, as far as chunks tell.
        ended: the stream ended as it should.
    """

    def __init__(self) -> None:
        self.stamps: list[Nanos] = []
        self.num_tokens = 0
        self.num_crowded = 0
        self.usage: _Usage | None = None
        self.error: dict[str, Any] | None = None
        self.ended = False
        self._events = EventParser()
        self._decoder = msgspec.json.Decoder(_Chunk)
        self.head = b""

    def feed(self, piece: bytes, now: Nanos) -> None:
        if len(self.head) < 2000:
            self.head += piece
        for event in self._events.feed(piece):
            if event == b"[DONE]":
                self.ended = True
                continue
            try:
                chunk = self._decoder.decode(event)
            except msgspec.MsgspecError as error:
                self.error = {"message": f"a chunk is not what OpenAI's look like: {error}"}
                continue
            self._take(chunk, now)

    def _take(self, chunk: _Chunk, now: Nanos) -> None:
        if chunk.error is not None:
            self.error = error_of({"error": chunk.error})
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            count = choice.num_tokens()
            if count:
                self.stamps.append(now)
                self.num_tokens += count
                self.num_crowded += count > 1


class Player:
    """One replay. `replay` and `play` drive it.

    Args:
        requests: in order of arrival.
        world: what serves it: "real" or "emulated".
        time_dilation: the schedule is stretched by this, and what is measured is divided by it.
        timeout_s: after so long, on the wall clock, a request is given up.
        max_in_flight: at most so many at once; what waits leaves late. None: as many as are due.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        requests: Sequence[OfferedRequest],
        prompts: Prompts,
        *,
        world: str,
        time_dilation: float,
        timeout_s: float,
        max_in_flight: int | None,
        progress: Progress | None,
    ) -> None:
        self._client = client
        self._model = model
        self._requests = requests
        self._prompts = prompts
        self._dilation = time_dilation
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_in_flight) if max_in_flight is not None else nullcontext()
        self._progress = progress
        self._start: Nanos = 0
        self._lateness: list[Nanos] = []
        self._done = self._failed = 0
        self._running: set[asyncio.Task[None]] = set()
        self.record = ReplayRecord(world, [], Gaps(), latency_source="measured by the client", prompts=prompts.describe())

    async def run(self) -> ReplayRecord:
        """Send everything and wait for it. When it is cancelled, what is done is kept and the rest counts as cancelled."""
        self._start = time.monotonic_ns()
        try:
            for request in self._requests:
                body = self._body(request)
                await self._until(request.arrived_at)
                task = asyncio.create_task(self._send(request, body))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                self._report()
            await self._drain()
        except asyncio.CancelledError:
            for task in self._running:
                task.cancel()
            await self._drain()
            self.record.not_sent = len(self._requests) - len(self.record.requests)
        return self._finished()

    async def _drain(self) -> None:
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _until(self, due: Nanos) -> None:
        wait = self._start + due * self._dilation - time.monotonic_ns()
        if wait > 0:
            await asyncio.sleep(wait / 1e9)

    def _now(self, at: Nanos) -> Nanos:
        """An instant of the wall clock as one of the run."""
        return round((at - self._start) / self._dilation)

    def _body(self, request: OfferedRequest) -> bytes:
        wanted = request.num_output_tokens
        return msgspec.json.encode(
            {
                "model": self._model,
                **self._prompts.fields(request),
                "max_tokens": wanted,
                "min_tokens": wanted,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )

    async def _send(self, request: OfferedRequest, body: bytes) -> None:
        row = RequestRow(request.id, request.arrived_at, request.num_prompt_tokens)
        self.record.requests.append(row)
        watch = Watch()
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                self._lateness.append(self._now(time.monotonic_ns()) - request.arrived_at)
                response = await self._client.send("POST", self._prompts.path, body, watch.feed)
            judge(row, response.status, watch)
        except asyncio.CancelledError:
            row.outcome, row.error = Outcome.CANCELLED, "interrupted"
        except TimeoutError:
            row.outcome, row.error = Outcome.FAILED, f"gave up after {self._timeout_s:g} s"
        except HttpFailed as error:
            row.outcome, row.error = Outcome.FAILED, str(error)
        self._write_down(row, request, watch)

    def _write_down(self, row: RequestRow, request: OfferedRequest, watch: Watch) -> None:
        record = self.record
        usage = watch.usage or _Usage()
        row.num_output_tokens = watch.num_tokens if usage.completion_tokens is None else usage.completion_tokens
        row.num_prompt_tokens = request.num_prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            row.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        row.finished_at = self._now(time.monotonic_ns())
        stamps = [self._now(stamp) for stamp in watch.stamps]
        if stamps:
            row.first_token_at = stamps[0]
            if row.outcome is Outcome.COMPLETED:
                row.finished_at = stamps[-1]
        for earlier, later in pairwise(stamps):
            record.gaps.add(later - earlier)
        record.num_chunks += len(stamps)
        record.num_crowded_chunks += max(watch.num_crowded, int(row.num_output_tokens > len(stamps) > 0))
        record.early_stops += row.outcome is Outcome.COMPLETED and row.num_output_tokens < request.num_output_tokens
        self._done += 1
        self._failed += row.outcome is not Outcome.COMPLETED
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, len(self.record.requests) - self._done, self._failed)

    def _finished(self) -> ReplayRecord:
        record = self.record
        now = time.monotonic_ns()
        record.wall_s = (now - self._start) / 1e9
        record.requests.sort(key=lambda row: row.id)
        record.ended_at = max((row.finished_at for row in record.requests if row.finished_at != UNSET), default=self._now(now))
        late = sorted(self._lateness)
        if late:
            record.late_p99, record.late_max = late[(len(late) - 1) * 99 // 100], late[-1]
        record.warnings = warnings_of(record, self._requests, self._prompts)
        return record


def judge(row: RequestRow, status: int, watch: Watch) -> None:
    """How the request ended, from its status and its stream."""
    error = watch.error
    if status != 200:
        try:
            error = error_of(msgspec.json.decode(watch.head))
        except msgspec.MsgspecError:
            error = {"message": watch.head[:200].decode(errors="replace")}
    if error is not None:
        rejected = status in (429, 503) or (status == 400 and error.get("code") in REJECTIONS)
        row.outcome = Outcome.REJECTED if rejected else Outcome.FAILED
        row.error = f"{status} {error.get('message') or 'no explanation'}"[:300]
    elif not watch.ended:
        row.outcome, row.error = Outcome.FAILED, "the stream ended without [DONE]"
    elif not watch.stamps:
        row.outcome, row.error = Outcome.FAILED, "the stream held no token"
    else:
        row.outcome = Outcome.COMPLETED


def warnings_of(record: ReplayRecord, requests: Sequence[OfferedRequest], prompts: Prompts) -> list[str]:
    """What a reader of the numbers must know."""
    warnings = []
    if record.late_p99 > LATE:
        warnings.append(
            f"requests left late: p99 {record.late_p99 / 1e6:.0f} ms, at most {record.late_max / 1e6:.0f} ms after due. "
            "The client (or its limit on requests in flight) did not keep up, and latencies include it"
        )
    completed = [row for row in record.requests if row.outcome is Outcome.COMPLETED]
    failures = Counter(row.error for row in record.requests if row.outcome in (Outcome.FAILED, Outcome.REJECTED))
    if failures:
        reason, times = failures.most_common(1)[0]
        warnings.append(
            f"{failures.total()} of {len(requests)} requests were not served; latencies are of the others. "
            f"Most often ({times}): {reason}"
        )
    if record.early_stops:
        warnings.append(
            f"{record.early_stops} of {len(completed)} completed requests stopped early: the server ignores ignore_eos"
        )
    asked = {request.id: request.num_prompt_tokens for request in requests}
    other = sum(row.num_prompt_tokens != asked[row.id] for row in completed)
    if other:
        warnings.append(
            f"{other} of {len(completed)} prompts had another length than asked for; the server's own counts are recorded"
        )
    elif not prompts.exact:
        warnings.append("prompt lengths could not be verified: the server reports no usage that fits")
    if record.num_crowded_chunks:
        warnings.append(
            f"at least {record.num_crowded_chunks} of {record.num_chunks} chunks held several tokens: "
            "TBT is the gap between chunks, not between tokens"
        )
    if record.not_sent:
        warnings.append(f"interrupted: {record.not_sent} of {len(requests)} requests were not sent")
    return warnings


async def play(
    url: str,
    model: str,
    requests: Sequence[OfferedRequest],
    *,
    api_key: str | None = None,
    tokenizer: Path | None = None,
    world: str = "real",
    time_dilation: float = 1.0,
    timeout_s: float = 600.0,
    max_in_flight: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    block_size: int = 16,
    ready: Callable[[], Awaitable[object]] | None = None,
) -> ReplayRecord:
    """`replay`, inside an event loop that already runs. It begins when `ready` has been waited for."""
    client = Client(parse_address(url), api_key)
    try:
        try:
            prompts = await find_prompts(client, model, tokenizer, seed, block_size)
        except HttpFailed as error:
            raise ConfigError(f"{url}: {error}; is the server running?") from None
        if ready is not None:
            await ready()
        player = Player(
            client, model, requests, prompts,
            world=world, time_dilation=time_dilation, timeout_s=timeout_s, max_in_flight=max_in_flight, progress=progress,
        )  # fmt: skip
        return await player.run()
    finally:
        client.close()


def replay(url: str, model: str, requests: Sequence[OfferedRequest], **options: Any) -> ReplayRecord:
    """Send `requests` to an OpenAI-compatible endpoint, each when it is due, and record what comes back.

    Ctrl-C ends the run and keeps what is done.

    Args:
        url: `http://host:port`, with or without `/v1`.
        requests: in order of arrival; `arrived_at` counts from the start of the run.
        options: those of `play`: `api_key`; `tokenizer` (a local tokenizer.json, for servers that take neither token ids nor
            /tokenize); `world` ("real" or "emulated"); `time_dilation` (the schedule is stretched by it, measured times are
            divided by it); `timeout_s` for each request; `max_in_flight` (None: open loop); `progress` (called with the numbers
            of requests done, in flight and failed); `seed` and `block_size` of the prompts.

    Raises:
        ConfigError: the URL is none, nobody answers there, or the server does not take a request for `model`.
    """
    return run(play(url, model, requests, **options))
