"""A span of every generation request, for OpenTelemetry: made when the request has ended, from what was measured of it.

Needs `pip install 'squall[otel]'`, and is imported only where `serve.otlp_endpoint` is set. Knows OpenTelemetry's names for
generative models (`squall.*` are our own), not how requests are served. Spans leave in a thread of their own: a collector that is
away costs one line and the spans, never a token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from squall import __version__
from squall.live.api.errors import translate
from squall.live.api.metrics import Measured
from squall.live.frontend import TokenStream

PATH = "/v1/traces"
LAST_SPANS_S = 2.0
"""How long the last spans may take to leave when the service ends."""


class Tracer:
    """Makes spans.

    Args:
        provider: takes them where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("squall", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, operation: str, headers: Mapping[str, str], request_id: str, measured: Measured) -> None:
        """The span of a request that has ended now. Where its headers have a `traceparent`, that is its parent, and says whether
        it is sampled."""
        ended_at = time.time_ns()
        model = measured.order.model if measured.order is not None else None
        span = self._tracer.start_span(
            operation if model is None else f"{operation} {model}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            start_time=ended_at - (time.monotonic_ns() - measured.arrived_at),
        )
        if span.is_recording():
            attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "squall", "squall.request_id": request_id}
            span.set_attributes(attributes | asked(measured) | answered(measured) | served(measured.streams))
            if (error := failure(measured)) is not None:
                kind, why = error
                span.set_attribute("error.type", kind)
                span.set_status(Status(StatusCode.ERROR, why))
        span.end(ended_at)

    def close(self) -> None:
        """Send what is left, for as long as that may take. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # it waits for half a minute, if it has to
        closing.start()
        closing.join(LAST_SPANS_S)


def asked(measured: Measured) -> dict[str, AttributeValue]:
    """What the request wants; nothing where it could not be read."""
    order = measured.order
    if order is None:
        return {}
    return {
        "gen_ai.request.model": order.model,
        "gen_ai.request.max_tokens": order.max_tokens,
        "gen_ai.request.temperature": order.sampling.temperature,
        "gen_ai.request.top_p": order.sampling.top_p,
        "gen_ai.request.choice.count": order.n,
        "gen_ai.request.stream": order.stream,
    }


def answered(measured: Measured) -> dict[str, AttributeValue]:
    """What has come of it so far. Times are seconds from its arrival."""
    found: dict[str, AttributeValue] = {}
    if (usage := measured.usage) is not None:
        found["gen_ai.usage.input_tokens"] = usage.num_prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.num_output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.num_cached_tokens
    if measured.response_id is not None:
        found["gen_ai.response.id"] = measured.response_id
    if measured.first_at is not None:
        found["gen_ai.response.time_to_first_chunk"] = (measured.first_at - measured.arrived_at) / 1e9
    if measured.finish_reasons:
        found["gen_ai.response.finish_reasons"] = [reason for _, reason in sorted(measured.finish_reasons.items())]
    return found


def served(streams: Sequence[TokenStream]) -> dict[str, AttributeValue]:
    """Where its sub-requests have been; how long the last of them waited for a replica, and for its first step."""
    journeys = [stream.journey for stream in streams]
    found: dict[str, AttributeValue] = {
        "squall.replicas": list(dict.fromkeys(replica for journey in journeys for replica in journey.replicas)),
        "squall.continued": any(journey.num_sent > 1 for journey in journeys),
    }
    if routed := [journey.routed_after for journey in journeys if journey.routed_after is not None]:
        found["squall.router_queue_s"] = max(routed) / 1e9
    if queued := [stream.queued for stream in streams if stream.queued is not None]:
        found["squall.queue_s"] = max(queued) / 1e9
    return found


def failure(measured: Measured) -> tuple[str, str] | None:
    """What kind of error it ended in, and its message; None where it completed."""
    if measured.error is not None:
        seen = translate(measured.error)
        return seen.code or seen.type, seen.message
    if measured.outcome == "cancelled":
        return "cancelled", "the client went away"
    return None


# -- where spans go


def open_tracer(endpoint: str, say: Callable[[str], None]) -> Tracer:
    """Spans go to the collector at `endpoint`, in batches; `OTEL_*` variables say the rest (headers, sampler, resource).

    Args:
        endpoint: its base URL, or the one for traces.
        say: tells a person that it cannot be reached, from another thread; once until it can.
    """
    own = Resource({"service.name": "squall", "service.version": __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(url if url.endswith(PATH) else url + PATH)
    provider.add_span_processor(BatchSpanProcessor(Collector(endpoint, exporter, say, Grumbles.of("opentelemetry"))))
    return Tracer(provider)


class Grumbles(logging.Handler):
    """Keeps what a library logs to itself. The first line after `clear` is there for whoever asks, and none is printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    @classmethod
    def of(cls, library: str) -> Grumbles:
        handler, logger = cls(), logging.getLogger(library)
        logger.handlers[:] = [handler]
        logger.propagate = False
        return handler

    def clear(self) -> None:
        self.first = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.first is None:
            self.first = " ".join(record.getMessage().split())


class Collector(SpanExporter):
    """An exporter that says when spans do not arrive: once until they do.

    Args:
        endpoint: as the user knows it.
        exporter: sends them, tries again and gives up.
        say: tells a person.
        grumbles: why they do not arrive.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter, say: Callable[[str], None], grumbles: Grumbles) -> None:
        self._endpoint = endpoint
        self._exporter = exporter
        self._say = say
        self._grumbles = grumbles
        self._is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._grumbles.clear()
        result = self._exporter.export(spans)
        was_away, self._is_away = self._is_away, result is not SpanExportResult.SUCCESS
        if self._is_away and not was_away:
            why = self._grumbles.first or "no reason given"
            self._say(f"spans do not reach serve.otlp_endpoint = {self._endpoint!r} and are dropped until they do: {why}")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
