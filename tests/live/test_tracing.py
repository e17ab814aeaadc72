"""The spans of requests, as a collector gets them that speaks OTLP: over HTTP, from a head with workers that pretend."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from squall.config import Config, Queue, dumps, load
from squall.core.types import MILLISECOND, Role
from squall.live.api.app import create_app
from squall.live.head import Head
from squall.policies.route import Pull
from squall.twin.demo import serving
from tests.live.in_process import in_process
from tests.live.test_disaggregated_emulated import SETTINGS as APART
from tests.live.test_head import Here, fleet

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="spans need OpenTelemetry (pip install 'squall[otel]')")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from squall.live.tracing import open_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "pretend", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """Takes spans, or refuses them.

    Attributes:
        status: what it answers.
        asked: how often it was.
        got: what it has taken.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.status = 200
        self.asked = 0
        self.got: list[ResourceSpans] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [span for resource in self.got for scope in resource.scope_spans for span in scope.spans]


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.server.status
        self.server.asked += 1  # from here on the status may be another
        if status == 200:
            self.server.got.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        serving = threading.Thread(target=collector.serve_forever, args=(0.01,))
        serving.start()
        yield collector
        collector.shutdown()
        serving.join()


@pytest.fixture
def here(make_host: Any) -> Here:
    return Here(make_host)


@pytest.fixture
def slow(make_host: Any) -> Here:
    """Replica 0 takes 20 s for 400 tokens, the other one half a second."""
    return Here(lambda replica: make_host(replica, step=MILLISECOND if replica else 50 * MILLISECOND))


@asynccontextmanager
async def traced(head: Head, url: str, say: Callable[[str], None] = print) -> AsyncIterator[httpx.AsyncClient]:
    """The API in front of `head`; all spans have left when the block has ended."""
    tracer = open_tracer(url, say)
    app = create_app(head, Config(), tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall", timeout=60) as client:
        yield client
    await asyncio.to_thread(tracer.close)


def value(of: AnyValue) -> Any:
    """As Python says it."""
    kind = of.WhichOneof("value")
    assert kind is not None
    return [value(each) for each in of.array_value.values] if kind == "array_value" else getattr(of, kind)


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in of.attributes}


async def test_a_request_is_a_span_below_its_clients(here: Here, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    asked = {**CHAT, "temperature": 0.5, "top_p": 0.25, "n": 2}
    async with fleet(here) as head, traced(head, collector.url) as client:
        answer = (await client.post("/v1/chat/completions", json=asked, headers=headers)).json()
    [span] = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind, span.status.code) == ("chat pretend", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    told = attributes(span)
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 <= told.pop("squall.router_queue_s") <= told.pop("squall.queue_s")
    assert 0 < told.pop("gen_ai.response.time_to_first_chunk") < took_s
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "squall",
        "gen_ai.request.model": "pretend",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "squall.request_id": "mine",
        "squall.replicas": [0],
        "squall.continued": False,
    }
    [resource] = collector.got
    assert attributes(resource.resource)["service.name"] == "squall"


async def test_a_stream_and_a_prompt_that_is_cached(here: Here, collector: Collector) -> None:
    asked = {"model": "pretend", "prompt": list(range(40)), "max_tokens": 3, "ignore_eos": True, "stream": True}
    async with fleet(here) as head, traced(head, collector.url) as client:
        answers = [(await client.post("/v1/completions", json=asked)).text for _ in range(2)]
    first, second = collector.spans
    assert (first.name, first.parent_span_id) == ("text_completion pretend", b"")
    assert first.trace_id != second.trace_id
    for answer, span in zip(answers, (first, second), strict=True):
        told = attributes(span)
        assert told["gen_ai.request.stream"] is True
        assert f'"id":"{told["gen_ai.response.id"]}"' in answer
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (40, 3)
    assert [attributes(span)["gen_ai.usage.cache_read.input_tokens"] for span in (first, second)] == [0, 36]


async def test_the_client_decides_whether_its_request_is_sampled_and_nonsense_decides_nothing(
    here: Here, collector: Collector
) -> None:
    async with fleet(here) as head, traced(head, collector.url) as client:
        for traceparent in (f"00-{TRACE}-{PARENT}-00", "nonsense", f"00-{TRACE}-{PARENT}-01"):
            await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": traceparent})
    assert [span.parent_span_id.hex() for span in collector.spans] == ["", PARENT]


async def test_every_way_not_to_be_served_is_an_error(slow: Here, collector: Collector) -> None:
    long = {**CHAT, "max_tokens": 400}
    async with (
        fleet(slow, queue=Queue(max_requests=1, max_retries=0), route=Pull(max_outstanding=1)) as head,
        traced(head, collector.url) as client,
    ):
        await client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
        await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        running, queued = (asyncio.create_task(client.post("/v1/chat/completions", json=long)) for _ in range(2))
        while head.stats().num_queued == 0:
            await asyncio.sleep(0.002)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 429
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        while not slow.hosts[0].session or not any(stream.output for stream in head._streams._open.values()):
            await asyncio.sleep(0.002)
        slow.break_down(0)
        assert (await running).status_code == 500
    assert {span.status.code for span in collector.spans} == {Status.STATUS_CODE_ERROR}
    told = [(attributes(span)["error.type"], span.name) for span in collector.spans]
    assert told == [
        ("invalid_value", "chat"),
        ("model_not_found", "chat"),
        ("rate_limit_exceeded", "chat pretend"),
        ("cancelled", "chat pretend"),
        ("internal_error", "chat pretend"),
    ]
    assert collector.spans[0].status.message.startswith("temperature: expected")
    refused, left, failed = (attributes(span) for span in collector.spans[2:])
    assert (refused["squall.replicas"], left["squall.replicas"], failed["squall.replicas"]) == ([], [], [0])
    assert "squall.router_queue_s" not in left
    assert 0 < failed["gen_ai.usage.output_tokens"] < 400
    assert "gen_ai.response.finish_reasons" not in failed


async def test_a_request_whose_replica_dies_tells_where_it_went_on(slow: Here, collector: Collector) -> None:
    async with fleet(slow, replicas=2) as head, traced(head, collector.url) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 100}))
        while not (found := [stream for stream in head._streams._open.values() if len(stream.output) > 3]):
            await asyncio.sleep(0.002)
        assert found[0].journey.replicas == (0,)
        slow.break_down(0)
        await asking
    [span] = collector.spans
    told = attributes(span)
    assert (told["squall.replicas"], told["squall.continued"]) == ([0, 1], True)
    assert told["gen_ai.usage.output_tokens"] == 100
    assert span.status.code == Status.STATUS_CODE_UNSET


async def test_a_hand_off_is_two_replicas_and_no_loss(tmp_path: Path, collector: Collector) -> None:
    async with in_process(tmp_path / "log", *APART) as (head, _), traced(head, collector.url) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": head.model_names[0]})
        assert answer.status_code == 200
        roles = {replica.replica: replica.role for replica in head.stats().replicas}
    told = attributes(collector.spans[0])
    assert [roles[replica] for replica in told["squall.replicas"]] == [Role.PREFILL.value, Role.DECODE.value]
    assert told["squall.continued"] is False


async def test_a_collector_that_refuses_is_one_line_until_it_takes_spans(
    here: Here, collector: Collector, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds: each span is a batch of its own
    said: list[str] = []
    async with fleet(here) as head, traced(head, collector.url, said.append) as client:
        for asked, status in enumerate((401, 401, 200, 404), start=1):
            collector.status = status
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            while collector.asked < asked:
                await asyncio.sleep(0.002)
    assert len(collector.spans) == 1
    first, second = said
    assert first.startswith(f"spans do not reach serve.otlp_endpoint = '{collector.url}' and are dropped until they do: ")
    assert "401" in first
    assert "404" in second
    assert capfd.readouterr() == ("", "")


async def test_a_collector_that_is_not_there_keeps_nobody(here: Here, capfd: pytest.CaptureFixture[str]) -> None:
    with Collector() as gone:
        url = gone.url
    async with fleet(here) as head, traced(head, url) as client:
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert capfd.readouterr().err == ""


def test_a_service_sends_its_last_spans_before_it_ends(tmp_path: Path, collector: Collector) -> None:
    settings = [f"serve.otlp_endpoint={collector.url}/v1/traces", 'model.served_as=["pretend"]', "serve.port=0"]
    file = tmp_path / "run.toml"
    file.write_text(dumps(load(None, ["serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", *settings])))
    with serving(file, tmp_path / "run") as (host, port):
        httpx.post(f"http://{host}:{port}/v1/chat/completions", json=CHAT, timeout=60).raise_for_status()
    assert [span.name for span in collector.spans] == ["chat pretend"]
