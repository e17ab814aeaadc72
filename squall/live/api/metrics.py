"""What Prometheus reads. squall's own names (`squall_*`) are the truth; `vllm:*` names are made from them at the scrape.

Knows durations and counts of requests as the front door sees them; what replicas do, it asks of the head when scraped. Knows no
HTTP. A registry belongs to one application: nothing is global.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from squall.core.events import Rejection
from squall.core.lifecycle import Phase
from squall.core.types import Nanos
from squall.errors import Rejected
from squall.live.api.errors import CLIENT_CLOSED, translate
from squall.live.api.order import Order
from squall.live.api.usage import Usage
from squall.live.engine.interface import TokenOut
from squall.live.frontend import Frontend, FrontendStats, TokenStream

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
OUTCOMES = (
    ("completed", 200), ("invalid", 400), ("invalid", 404), ("rejected", 400), ("rejected", 429), ("rejected", 503),
    ("failed", 500), ("cancelled", CLIENT_CLOSED),
)  # fmt: skip
LOAD_KINDS = ("disk", "host", "p2p", "chain", "striped", "mock")
FINISH_REASONS = ("stop", "length")


def token_buckets(longest: int) -> list[float]:
    """1, 2, 5, 10, ... up to the first that holds `longest`."""
    buckets = [1.0]
    while buckets[-1] < longest:
        scale = 10 ** (len(buckets) // 3)
        buckets.append(float(scale * (1, 2, 5)[len(buckets) % 3]))
    return buckets


class Metrics:
    """All families of one application. Build it with `build_metrics`.

    Attributes:
        in_flight: generation requests being served now.
    """

    def __init__(self, model: str, longest: int) -> None:
        label = ("model",)
        tokens = token_buckets(longest)
        self.model = model
        self.in_flight = 0
        self.requests = _counter(
            "squall_requests", "Generation requests, by how they ended and their HTTP status.", "outcome", "code"
        )
        self.rejections = _counter("squall_rejections", "Well-formed requests that were not served.", "reason")
        self.choices = _counter("squall_choices", "Finished choices.", "finish_reason")
        self.prompt_tokens = _counter("squall_prompt_tokens", "Prompt tokens of requests that produced a token.")
        self.output_tokens = _counter("squall_output_tokens", "Tokens generated.")
        self.unknown_fields = _counter("squall_unknown_fields", "Request fields that squall does not know, and ignored.")
        self.flying = Gauge("squall_requests_in_flight", "Generation requests being served.", label, registry=None)
        self.ttft = _histogram("squall_time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self.gap = _histogram("squall_inter_token_latency_seconds", "Between two tokens of one choice.", ITL_BUCKETS)
        self.tpot = _histogram("squall_time_per_output_token_seconds", "Mean gap between tokens of a request.", ITL_BUCKETS)
        self.duration = _histogram("squall_request_duration_seconds", "From arrival to the last token.", E2E_BUCKETS)
        self.decode = _histogram("squall_decode_seconds", "From the first token to the last.", E2E_BUCKETS)
        self.queue = _histogram("squall_queue_seconds", "From arrival to the first step that worked on the request.", E2E_BUCKETS)
        self.prompt_length = _histogram("squall_request_prompt_tokens", "Tokens in a prompt.", tokens)
        self.output_length = _histogram("squall_request_output_tokens", "Tokens generated for a request.", tokens)
        self.max_tokens = _histogram("squall_request_max_tokens", "Tokens that a request allowed.", tokens)
        self.n = _histogram("squall_request_n", "Choices asked for.", COUNT_BUCKETS)

    def families(self) -> list[Counter | Gauge | Histogram]:
        return [each for each in vars(self).values() if isinstance(each, Counter | Gauge | Histogram)]

    def expose_zeros(self) -> None:
        """Create every label set that is known beforehand: what is missing is not 0."""
        for family in self.families():
            if family._labelnames == ("model",):
                family.labels(self.model)
        for outcome, code in OUTCOMES:
            self.requests.labels(self.model, outcome, str(code))
        for rejection in Rejection:
            self.rejections.labels(self.model, rejection.value)
        for reason in FINISH_REASONS:
            self.choices.labels(self.model, reason)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, ("model", *labels), registry=None)


def _histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
    return Histogram(name, text, ("model",), buckets=tuple(buckets), registry=None)


def build_metrics(frontend: Frontend) -> Metrics:
    """The families of an application that serves `frontend`, all at 0."""
    metrics = Metrics(frontend.model_names[0], frontend.max_model_len)
    metrics.expose_zeros()
    return metrics


class Measured:
    """One generation request being measured, from arrival to its end.

    Attributes:
        order: what it asks for, once it was read and found good.
        streams, usage: of its sub-requests, once they are with the head.
        response_id: the answer's.
        first_at: the instant of its first token.
        finish_reasons: by sub-request.
        error: how it ended where it neither completed nor was cancelled.
        outcome: as `squall_requests` counts it; None until it has ended.
    """

    def __init__(self, metrics: Metrics, now: Nanos) -> None:
        self.arrived_at = now
        self.order: Order | None = None
        self.streams: Sequence[TokenStream] = ()
        self.usage: Usage | None = None
        self.response_id: str | None = None
        self.first_at: Nanos | None = None
        self.finish_reasons: dict[int, str] = {}
        self.error: Exception | None = None
        self.outcome: str | None = None
        self._metrics = metrics
        self._last_at: dict[int, Nanos] = {}
        self._num_output_tokens = 0
        self._gap = metrics.gap.labels(metrics.model)
        metrics.in_flight += 1

    def understood(self, order: Order, num_unknown_fields: int) -> None:
        """The request was read and found good."""
        self.order = order
        metrics, model = self._metrics, self._metrics.model
        metrics.unknown_fields.labels(model).inc(num_unknown_fields)
        metrics.n.labels(model).observe(order.n)
        metrics.max_tokens.labels(model).observe(order.max_tokens)

    def submitted(self, streams: Sequence[TokenStream], usage: Usage) -> None:
        self.streams, self.usage = streams, usage

    def token(self, index: int, out: TokenOut, queued: Nanos | None) -> None:
        """A token of the `index`-th sub-request came; `queued` is how long that had waited for its first step."""
        now = time.monotonic_ns()
        self._num_output_tokens += 1
        last = self._last_at.get(index)
        if last is not None:
            self._gap.observe((now - last) / 1e9)
        elif queued is not None:
            self._metrics.queue.labels(self._metrics.model).observe(queued / 1e9)
        self._last_at[index] = now
        if self.first_at is None:
            self.first_at = now
            self._first(now)
        if out.finish is not None:
            self.finish_reasons[index] = out.finish
            self._metrics.choices.labels(self._metrics.model, out.finish).inc()

    def _first(self, now: Nanos) -> None:
        metrics, model = self._metrics, self._metrics.model
        metrics.ttft.labels(model).observe((now - self.arrived_at) / 1e9)
        for prompt in self.order.prompts if self.order is not None else ():
            metrics.prompt_tokens.labels(model).inc(len(prompt))
            metrics.prompt_length.labels(model).observe(len(prompt))

    def completed(self) -> None:
        now = time.monotonic_ns()
        metrics, model = self._metrics, self._metrics.model
        metrics.duration.labels(model).observe((now - self.arrived_at) / 1e9)
        metrics.output_length.labels(model).observe(self._num_output_tokens)
        if self.first_at is not None:
            decode_s = (now - self.first_at) / 1e9
            metrics.decode.labels(model).observe(decode_s)
            gaps = self._num_output_tokens - len(self._last_at)
            if gaps:
                metrics.tpot.labels(model).observe(decode_s * len(self._last_at) / gaps)
        self._ended("completed", 200)

    def failed(self, error: Exception) -> None:
        self.error = error
        status = translate(error).status
        if isinstance(error, Rejected):
            self._metrics.rejections.labels(self._metrics.model, error.reason).inc()
            self._ended("rejected", status)
        else:
            self._ended("invalid" if status < 500 else "failed", status)

    def cancelled(self) -> None:
        self._ended("cancelled", CLIENT_CLOSED)

    def _ended(self, outcome: str, code: int) -> None:
        self.outcome = outcome
        metrics = self._metrics
        metrics.in_flight -= 1
        metrics.output_tokens.labels(metrics.model).inc(self._num_output_tokens)
        metrics.requests.labels(metrics.model, outcome, str(code)).inc()


class Exporter(Collector):
    """Yields everything at the scrape: own families, the head's numbers, and the aliases."""

    def __init__(self, metrics: Metrics, frontend: Frontend, block_size: int, vllm: bool) -> None:
        self._metrics = metrics
        self._frontend = frontend
        self._block_size = block_size
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        stats = self._frontend.stats()
        self._metrics.flying.labels(self._metrics.model).set(self._metrics.in_flight)
        own = [without_created(family) for each in self._metrics.families() for family in each.collect()]
        own.extend(head_families(self._metrics.model, stats))
        yield from own
        if self._vllm:
            yield from vllm_aliases(own, self._metrics.model, stats, self._block_size)


class Merged(Collector):
    """What several collectors yield, one for each model: a family is told once, with the samples of all."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                if (known := families.setdefault(family.name, family)) is not family:
                    known.samples += family.samples
        yield from families.values()


def without_created(family: Metric) -> Metric:
    """`family` without the `_created` instants that the client library adds and nobody here reads."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def head_families(model: str, stats: FrontendStats) -> Iterator[Metric]:
    """What the head says of its replicas. A replica that is gone leaves no series behind."""
    phases = GaugeMetricFamily("squall_replicas", "Replicas, by role and phase.", labels=("model", "role", "phase"))
    for role in {scale.role: None for scale in stats.scales} | {replica.role: None for replica in stats.replicas}:
        for phase in Phase:
            count = sum((replica.role, replica.phase) == (role, phase.value) for replica in stats.replicas)
            phases.add_metric((model, role, phase.value), count)
    yield phases
    yield from scaling_families(model, stats)
    for name, text, value in (
        ("squall_requests_queued", "Requests in the router, bound to no replica yet.", stats.num_queued),
        ("squall_requests_waiting", "Requests waiting at a replica.", sum(each.num_waiting for each in stats.replicas)),
        ("squall_requests_running", "Requests in a replica's batch.", sum(each.num_running for each in stats.replicas)),
        ("squall_kv_usage_ratio", "Share of all KV blocks in use.", kv_usage(stats)),
    ):
        family = GaugeMetricFamily(name, text, labels=("model",))
        family.add_metric((model,), value)
        yield family
    for name, text, field in (
        ("squall_replica_running", "Requests in this replica's batch.", "num_running"),
        ("squall_replica_waiting", "Requests waiting at this replica.", "num_waiting"),
        ("squall_replica_kv_blocks", "KV blocks of this replica.", "num_blocks"),
        ("squall_replica_kv_blocks_used", "KV blocks of this replica in use.", "num_used_blocks"),
        ("squall_replica_layers", "Layers whose weights this replica has.", "num_layers"),
    ):
        family = GaugeMetricFamily(name, text, labels=("model", "replica"))
        for replica in stats.replicas:
            family.add_metric((model, str(replica.replica)), getattr(replica, field))
        yield family
    for name, text, value in (
        ("squall_preemptions", "Requests that lost their KV and started again.", stats.num_preemptions),
        ("squall_prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_cache_queries),
        ("squall_prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache.", stats.num_prefix_cache_hits),
    ):
        counter = CounterMetricFamily(name, text, labels=("model",))
        counter.add_metric((model,), value)
        yield counter


def scaling_families(model: str, stats: FrontendStats) -> Iterator[Metric]:
    """How many replicas are wanted, and how their weights came."""
    target = GaugeMetricFamily("squall_replicas_wanted", "Replicas that there should be.", labels=("model", "role"))
    events = CounterMetricFamily(
        "squall_scale_events", "Changes of how many replicas there should be.", labels=("model", "role", "direction")
    )
    for scale in stats.scales:
        target.add_metric((model, scale.role), scale.target)
        for direction, count in (("up", scale.num_up), ("down", scale.num_down)):
            events.add_metric((model, scale.role, direction), count)
    yield from (target, events)
    for name, text, field in (
        ("squall_loads", "Loads of weights that ended well.", "count"),
        ("squall_load_seconds", "Time from the order to the last layer, of all loads.", "seconds"),
        ("squall_load_bytes", "Bytes of weights that came.", "num_bytes"),
        ("squall_load_repaired_sections", "Layers that came with a wrong checksum, and again.", "num_repaired"),
    ):
        family = CounterMetricFamily(name, text, labels=("model", "kind"))
        by_kind = {load.kind: getattr(load, field) for load in stats.loads}
        for kind in LOAD_KINDS:
            family.add_metric((model, kind), by_kind.get(kind, 0))
        yield family
    if stats.gpus is not None:
        for name, text, value in (
            ("squall_gpus_held", "GPUs that the model has of the cluster that it shares.", stats.gpus.held),
            ("squall_gpus_awaited", "GPUs that it wants besides, and other models have.", stats.gpus.awaited),
        ):
            gpus = GaugeMetricFamily(name, text, labels=("model",))
            gpus.add_metric((model,), value)
            yield gpus
    failed = CounterMetricFamily("squall_loads_failed", "Loads of weights that failed.", labels=("model",))
    failed.add_metric((model,), stats.num_failed_loads)
    yield failed


def kv_usage(stats: FrontendStats) -> float:
    total = sum(replica.num_blocks for replica in stats.replicas)
    return sum(replica.num_used_blocks for replica in stats.replicas) / total if total else 0.0


ALIASES = {
    "squall_requests_running": ("vllm:num_requests_running",),
    "squall_kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "squall_prefix_cache_queries_tokens": ("vllm:prefix_cache_queries",),
    "squall_prefix_cache_hits_tokens": ("vllm:prefix_cache_hits",),
    "squall_preemptions": ("vllm:num_preemptions",),
    "squall_prompt_tokens": ("vllm:prompt_tokens",),
    "squall_output_tokens": ("vllm:generation_tokens",),
    "squall_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "squall_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "squall_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "squall_request_duration_seconds": ("vllm:e2e_request_latency_seconds",),
    "squall_queue_seconds": ("vllm:request_queue_time_seconds",),
    "squall_decode_seconds": ("vllm:request_decode_time_seconds",),
    "squall_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "squall_request_output_tokens": ("vllm:request_generation_tokens",),
    "squall_request_max_tokens": ("vllm:request_params_max_tokens",),
    "squall_request_n": ("vllm:request_params_n",),
}


def vllm_aliases(own: Iterable[Metric], model: str, stats: FrontendStats, block_size: int) -> Iterator[Metric]:
    """The names that dashboards and autoscalers made for vLLM ask for. The fleet looks like one engine, numbered 0."""
    by_name = {family.name: family for family in own}
    for name, aliases in ALIASES.items():
        for alias in aliases:
            yield renamed(by_name[name], alias)
    waiting = stats.num_queued + sum(replica.num_waiting for replica in stats.replicas)
    yield gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", waiting, model_name=model, engine="0")
    blocks = sum(replica.num_blocks for replica in stats.replicas)
    labels = {"model_name": model, "engine": "0", "block_size": str(block_size), "num_gpu_blocks": str(blocks)}
    yield gauge("vllm:cache_config_info", "The KV pool of the whole fleet.", 1, **labels)
    yield request_success(by_name, model)


def renamed(family: Metric, name: str) -> Metric:
    alias = Metric(name, family.documentation, family.type, family.unit if name.endswith(family.unit) else "")
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "model"}
        labels.update(model_name=sample.labels["model"], engine="0")
        alias.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return alias


def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def request_success(by_name: dict[str, Metric], model: str) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success", "Finished requests, by reason.", labels=("model_name", "engine", "finished_reason")
    )
    for sample in by_name["squall_choices"].samples:
        family.add_metric((model, "0", sample.labels["finish_reason"]), sample.value)
    cancelled = sum(each.value for each in by_name["squall_requests"].samples if each.labels["outcome"] == "cancelled")
    family.add_metric((model, "0", "abort"), cancelled)
    return family


def build_registry(exporters: Sequence[Exporter]) -> CollectorRegistry:
    """Of all models."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporters[0] if len(exporters) == 1 else Merged(exporters))
    return registry
