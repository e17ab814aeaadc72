"""The load generator against servers that do what real ones do: well, badly, late and not at all."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from squall.core.metrics import Outcome
from squall.errors import ConfigError
from squall.live.replay import ReplayRecord, play, replay
from squall.workload.spec import OfferedRequest

MS = 1_000_000
Answer = AsyncIterator[bytes]


class Clock:
    """Stands still but where it is told to go on.

    Attributes:
        asked: somebody has looked at it.
    """

    def __init__(self) -> None:
        self.now = 10**15
        self.asked = asyncio.Event()

    def monotonic_ns(self) -> int:
        self.asked.set()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the client tells the time by."""
    clock = Clock()
    for module in ("replay", "replay_http"):
        monkeypatch.setattr(f"squall.live.{module}.time", clock)
    return clock


def ticking(server: "Scripted", clock: Clock, gap_ms: int) -> "Scripted":
    """So long passes after each piece that the client has seen."""

    async def stream(body: dict[str, Any]) -> Answer:
        async for piece in server.tokens(body):
            clock.asked.clear()
            yield piece
            if piece != STREAM:
                await clock.asked.wait()
                clock.now += gap_ms * MS

    server.stream = stream
    return server


class Scripted:
    """A server of one endpoint, byte by byte. By default it takes token ids and answers as it should.

    Attributes:
        asked: every generation request but the small ones that ask what the server can.
        num_connections: accepted so far.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.num_connections = 0
        self.takes: Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]] = self.count
        self.stream: Callable[[dict[str, Any]], Answer] = self.tokens
        self.gap_s = 0.0

    def count(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The answer to a request that is not streamed."""
        if path != "/v1/completions" or not isinstance(body["prompt"], list):
            return 404, {"error": {"message": "no such path"}}
        return 200, {"usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}}

    async def tokens(self, body: dict[str, Any]) -> Answer:
        yield STREAM
        for token in range(body["max_tokens"]):
            if token:
                await asyncio.sleep(self.gap_s)
            yield event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
        yield usage(len(body["prompt"]), body["max_tokens"]) + event("[DONE]") + END

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                path = head.split(" ")[1]
                if body.get("stream"):
                    self.asked.append(body)
                    async for piece in self.stream(body):
                        writer.write(piece)
                        await writer.drain()
                else:
                    status, answer = self.takes(path, body)
                    writer.write(whole(status, answer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n")


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def whole(status: int, answer: Any) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def listening(server: Scripted) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


async def run(server: Scripted, requests: list[OfferedRequest], **options: Any) -> ReplayRecord:
    async with listening(server) as url:
        return await play(url, "any", requests, **options)


def notes(record: ReplayRecord) -> list[str]:
    """The warnings, but for the one that says that this machine is busy."""
    return [warning for warning in record.warnings if not warning.startswith("requests left late")]


def offered(*at_ms: int, prompt: int = 30, output: int = 4) -> list[OfferedRequest]:
    return [OfferedRequest(i, at * MS, prompt, output) for i, at in enumerate(at_ms)]


# -- when and what


async def test_requests_leave_when_they_are_due_whatever_became_of_the_others() -> None:
    server = Scripted()
    all_here = asyncio.Event()

    async def stream(body: dict[str, Any]) -> Answer:
        if len(server.asked) == 3:
            all_here.set()
        await all_here.wait()  # nobody is answered before all have come
        async for piece in server.tokens(body):
            yield piece

    server.stream = stream
    record = await run(server, offered(0, 20, 40))
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 3
    assert [row.arrived_at for row in record.requests] == [0, 20 * MS, 40 * MS]
    assert all(40 * MS <= row.first_token_at <= row.finished_at <= record.ended_at for row in record.requests)
    assert (record.world, record.latency_source) == ("real", "measured by the client")


async def test_prompts_are_token_ids_of_exact_length_that_share_what_the_workload_shares() -> None:
    server = Scripted()
    requests = [
        OfferedRequest(0, 0, 40, 2, block_hashes=(7, 8)),
        OfferedRequest(1, 0, 50, 2, block_hashes=(7, 9)),
        OfferedRequest(2, 0, 33, 2),
    ]
    await run(server, requests)
    by_length = {len(body["prompt"]): body["prompt"] for body in server.asked}
    first, second, third = by_length[40], by_length[50], by_length[33]
    assert first[:16] == second[:16]
    assert first[16:32] != second[16:32]
    assert first[:16] != third[:16]
    assert all(32 <= token < 256 for token in (*first, *second, *third))


async def test_each_request_asks_for_exactly_its_tokens_as_a_stream_with_usage() -> None:
    server = Scripted()
    await run(server, offered(0, output=9))
    (body,) = server.asked
    assert {key: body[key] for key in ("max_tokens", "min_tokens", "ignore_eos", "stream", "stream_options")} == {
        "max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def test_gaps_are_those_between_chunks(clock: Clock) -> None:
    record = await run(ticking(Scripted(), clock, 30), offered(0, output=5))
    assert list(record.gaps.count) == [1] * 4
    assert [first >> 4 for first in record.gaps.first] == [30 * MS] * 4
    (row,) = record.requests
    assert (row.first_token_at, row.finished_at) == (0, 4 * 30 * MS)
    assert record.ended_at == row.finished_at


async def test_a_dilated_schedule_is_stretched() -> None:
    server = Scripted()
    server.gap_s = 0.04
    record = await run(server, offered(0, 50, output=2), time_dilation=4.0, world="emulated")
    assert record.world == "emulated"
    assert [row.arrived_at for row in record.requests] == [0, 50 * MS]
    assert record.wall_s >= 4 * 0.05 + 0.04
    assert record.ended_at * 4 <= record.wall_s * 1e9


async def test_what_is_measured_on_a_dilated_schedule_is_shrunk(clock: Clock) -> None:
    record = await run(ticking(Scripted(), clock, 80), offered(0, output=2), time_dilation=4.0, world="emulated")
    assert [first >> 4 for first in record.gaps.first] == [20 * MS]
    assert record.ended_at == 20 * MS


async def test_a_limit_on_requests_in_flight_is_kept_and_shows_as_lateness() -> None:
    server = Scripted()
    server.gap_s = 0.05
    most = 0

    def watch(done: int, in_flight: int, failed: int) -> None:
        nonlocal most
        most = max(most, len(server.asked) - done)

    record = await run(server, offered(0, 0, 0, 0, output=2), max_in_flight=2, progress=watch)
    assert most <= 2
    assert record.late_max >= 40 * MS
    assert "requests left late" in record.warnings[0]


async def test_connections_are_used_again() -> None:
    server = Scripted()
    await run(server, offered(0, 0, 0, 0), max_in_flight=1)  # each leaves when the one before is done
    assert server.num_connections == 1


# -- servers that take less, or do less


async def test_a_server_that_takes_no_token_ids_gets_words_that_its_tokenize_counts_as_one_token() -> None:
    server = Scripted()

    def takes(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            return 400, {"error": {"message": "prompt must be a string"}}
        if path == "/tokenize":  # words are one token, but "people" is two
            return 200, {"count": prompt.count(" ") + prompt.count("people")}
        return 200, {"usage": {"prompt_tokens": prompt.count(" ") + prompt.count("people") + 1}}  # and it adds one

    async def stream(body: dict[str, Any]) -> Answer:
        yield STREAM + event({"choices": [{"text": "x"}]}) * body["max_tokens"]
        yield usage(body["prompt"].count(" ") + 1, body["max_tokens"]) + event("[DONE]") + END

    server.takes, server.stream = takes, stream
    record = await run(server, offered(0, 0, prompt=100))
    assert all("people" not in body["prompt"] for body in server.asked)
    assert server.asked[0]["prompt"] != server.asked[1]["prompt"]
    assert [row.num_prompt_tokens for row in record.requests] == [100, 100]
    assert (record.prompts, notes(record)) == ("words to /v1/completions, exact lengths", [])


async def test_a_server_that_only_chats_gets_messages_and_its_own_counts_are_kept() -> None:
    server = Scripted()

    def takes(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != "/v1/chat/completions":
            return 404, {"detail": "Not Found"}
        return 200, {"usage": {"prompt_tokens": body["messages"][0]["content"].count(" ") + 11}}

    async def stream(body: dict[str, Any]) -> Answer:
        yield STREAM + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            yield event({"choices": [{"delta": {"content": "x"}}]})
        yield event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        yield usage(body["messages"][0]["content"].count(" ") + 11, body["max_tokens"]) + event("[DONE]") + END

    server.takes, server.stream = takes, stream
    record = await run(server, offered(0, prompt=60, output=5))
    (row,) = record.requests
    assert (row.outcome, row.num_prompt_tokens, row.num_output_tokens) == (Outcome.COMPLETED, 60, 5)
    assert (record.num_chunks, record.prompts) == (5, "words to /v1/chat/completions, exact lengths")


async def test_a_server_that_ignores_ignore_eos_is_found_out() -> None:
    server = Scripted()

    async def stream(body: dict[str, Any]) -> Answer:
        yield STREAM + event({"choices": [{"text": "x"}]}) * 2 + event({"choices": [{"text": "", "finish_reason": "stop"}]})
        yield usage(30, 2) + event("[DONE]") + END

    server.stream = stream
    record = await run(server, offered(0, 0, output=10))
    assert record.early_stops == 2
    assert [row.num_output_tokens for row in record.requests] == [2, 2]
    assert notes(record) == ["2 of 2 completed requests stopped early: the server ignores ignore_eos"]


async def test_chunks_of_several_tokens_are_counted_and_said() -> None:
    server = Scripted()

    async def stream(body: dict[str, Any]) -> Answer:
        yield STREAM + event({"choices": [{"text": "xy", "token_ids": [1, 2]}]}) * 2
        yield usage(30, 4) + event("[DONE]") + END

    server.stream = stream
    record = await run(server, offered(0))
    assert (record.num_chunks, record.num_crowded_chunks, record.requests[0].num_output_tokens) == (2, 2, 4)
    assert "at least 2 of 2 chunks held several tokens" in notes(record)[0]


async def test_a_server_without_usage_is_counted_by_chunks_and_the_report_says_so() -> None:
    server = Scripted()

    async def stream(body: dict[str, Any]) -> Answer:
        yield STREAM + event({"choices": [{"text": "x"}]}) * 4 + event("[DONE]") + END

    server.takes = lambda path, body: (200, {"choices": []})
    server.stream = stream
    record = await run(server, offered(0))
    assert record.requests[0].num_output_tokens == 4
    assert notes(record) == ["prompt lengths could not be verified: the server reports no usage that fits"]


# -- what goes wrong


async def failing(body: dict[str, Any]) -> Answer:
    """The length of the prompt says how it fails."""
    token = event({"choices": [{"text": "x"}]})
    match len(body["prompt"]):
        case 1:
            yield whole(429, {"error": {"message": "full", "code": "rate_limit_exceeded"}})
        case 2:
            yield whole(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
        case 3:
            yield whole(500, {"error": {"message": "worker died"}})
        case 4:
            yield STREAM + token + event({"error": {"message": "died in the middle"}}) + event("[DONE]") + END
        case 5:
            yield STREAM + token + END
        case 6:
            yield STREAM + token
            raise ConnectionError
        case 7:
            yield b"SSH-2.0-OpenSSH\r\n\r\n"
        case 8:
            yield STREAM + token
            await asyncio.sleep(30)
        case 9:
            yield STREAM + chunk(b"data: [1]\n\n") + END
        case 10:
            yield STREAM + event("[DONE]") + END


async def test_every_failure_is_written_down_with_its_reason_and_nothing_is_retried() -> None:
    server = Scripted()
    server.stream = failing
    requests = [OfferedRequest(length, 0, length, 4) for length in (1, 2, 3, 4, 5, 6, 7, 9, 10)]
    record = await run(server, requests)
    assert [(row.outcome, row.error) for row in record.requests] == [
        (Outcome.REJECTED, "429 full"),
        (Outcome.REJECTED, "400 too long"),
        (Outcome.FAILED, "500 worker died"),
        (Outcome.FAILED, "200 died in the middle"),
        (Outcome.FAILED, "the stream ended without [DONE]"),
        (Outcome.FAILED, "the server closed the connection"),
        (Outcome.FAILED, "the server does not speak HTTP/1.1: its answer begins with 'SSH-2.0-OpenSSH'"),
        (Outcome.FAILED, "200 a chunk is not what OpenAI's look like: Expected `object`, got `array`"),
        (Outcome.FAILED, "the stream held no token"),
    ]
    assert "9 of 9 requests were not served; latencies are of the others. Most often (1): 429 full" in notes(record)
    assert len(server.asked) == 9
    assert [row.num_output_tokens for row in record.requests][3:6] == [1, 1, 1]


async def test_a_server_that_falls_silent_is_not_waited_for() -> None:
    server = Scripted()
    server.stream = failing
    (row,) = (await run(server, [OfferedRequest(0, 0, 8, 4)], timeout_s=0.2)).requests
    assert (row.outcome, row.error) == (Outcome.FAILED, "gave up after 0.2 s")


async def test_an_interruption_keeps_what_is_done() -> None:
    server = Scripted()
    server.gap_s = 0.05
    done = asyncio.Event()

    def watch(finished: int, in_flight: int, failed: int) -> None:
        if finished:
            done.set()

    requests = [OfferedRequest(0, 0, 30, 1), OfferedRequest(1, 0, 30, 1000), OfferedRequest(2, 3_600_000 * MS, 30, 1)]
    async with listening(server) as url:
        task = asyncio.create_task(play(url, "any", requests, progress=watch))
        await done.wait()
        task.cancel()
        record = await task
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED, Outcome.CANCELLED]
    assert notes(record) == ["interrupted: 1 of 3 requests were not sent"]


async def test_ctrl_c_keeps_what_is_done() -> None:
    server = Scripted()
    code = (
        "import sys; from squall.live.replay import replay; from squall.workload.spec import OfferedRequest as R\n"
        "record = replay(sys.argv[1], 'any', [R(0, 0, 30, 1), R(1, 10**15, 30, 1)], progress=lambda *n: print(*n, flush=True))\n"
        "print([row.outcome.value for row in record.requests], record.not_sent)"
    )
    async with listening(server) as url:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, url, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        try:
            while (line := await child.stdout.readline()) != b"1 0 0\n":
                assert line, "it ended before its first request was done"
            child.send_signal(signal.SIGINT)
            assert (await child.stdout.read()).decode() == "['completed'] 1\n"
            assert await child.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^http://127.0.0.1:9: cannot connect to 127.0.0.1:9: .*; is the server running\?$"):
        replay("http://127.0.0.1:9", "any", offered(0))


async def test_a_model_that_is_not_served_is_one_line() -> None:
    server = Scripted()
    server.takes = lambda path, body: (404, {"error": {"message": "no model 'any'", "code": "model_not_found"}})
    with pytest.raises(ConfigError, match="does not take a request for model 'any': /v1/completions answers 404: no model 'any'"):
        await run(server, offered(0))


async def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path) -> None:
    server = Scripted()
    server.takes = lambda path, body: (200, {}) if isinstance(body["prompt"], str) else (400, {})
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a readable tokenizer\.json"):
        await run(server, offered(0), tokenizer=path)


def test_the_core_install_is_enough() -> None:
    heavy = ("torch", "starlette", "uvicorn", "grpc", "tokenizers", "prometheus_client", "jinja2")
    code = f"import sys, squall.live.replay; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
