"""What a scrape shows: everything known from the start, then what happened, under both sets of names."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from squall.config import Config, Serve
from squall.core.fleet_view import Transfer
from squall.errors import Rejected, ReplicaFailed
from squall.live.api.app import create_app
from squall.live.api.metrics import LOAD_KINDS, token_buckets

DEPLOY = Path(__file__).parents[3] / "deploy"


async def test_known_label_sets_are_there_at_zero_before_anything_happens(scrape: Any) -> None:
    seen = await scrape()
    for name in (
        'squall_requests_total{code="200",model="small",outcome="completed"}',
        'squall_requests_total{code="429",model="small",outcome="rejected"}',
        'squall_requests_total{code="499",model="small",outcome="cancelled"}',
        'squall_rejections_total{model="small",reason="queue_full"}',
        'squall_choices_total{finish_reason="stop",model="small"}',
        'squall_time_to_first_token_seconds_count{model="small"}',
        'squall_replicas{model="small",phase="failed",role="both"}',
        'vllm:num_requests_waiting{engine="0",model_name="small"}',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="small"}',
    ):
        assert seen[name] == 0
    assert seen['squall_replicas{model="small",phase="ready",role="both"}'] == 1
    assert not any("_created" in name for name in seen)


async def test_scaling_is_seen_by_role_and_loads_by_kind(scrape: Any) -> None:
    assert get_args(get_type_hints(Transfer)["kind"]) == LOAD_KINDS
    seen = await scrape()
    assert seen['squall_replicas_wanted{model="small",role="both"}'] == 1
    assert seen['squall_scale_events_total{direction="up",model="small",role="both"}'] == 4
    assert seen['squall_scale_events_total{direction="down",model="small",role="both"}'] == 3
    assert seen['squall_load_seconds_total{kind="chain",model="small"}'] == 3.5
    assert seen['squall_load_bytes_total{kind="chain",model="small"}'] == 1000
    assert seen['squall_load_repaired_sections_total{kind="chain",model="small"}'] == 1
    assert seen['squall_loads_total{kind="p2p",model="small"}'] == 0


async def test_a_request_is_seen_in_counters_and_histograms(chat: Any, complete: Any, scrape: Any) -> None:
    await chat(max_tokens=5, n=2)
    await complete(prompt=["hi", "hello"], max_tokens=3)
    seen = await scrape()
    assert seen['squall_requests_total{code="200",model="small",outcome="completed"}'] == 2
    assert seen['squall_output_tokens_total{model="small"}'] == 10 + 6
    assert seen['squall_prompt_tokens_total{model="small"}'] == 20 + 3 + 6
    assert seen['squall_time_to_first_token_seconds_count{model="small"}'] == 2
    assert seen['squall_inter_token_latency_seconds_count{model="small"}'] == 2 * 4 + 2 * 2
    assert seen['squall_request_duration_seconds_count{model="small"}'] == 2
    assert seen['squall_queue_seconds_count{model="small"}'] == 4
    assert seen['squall_queue_seconds_sum{model="small"}'] == pytest.approx(0.004)
    assert seen['squall_request_prompt_tokens_count{model="small"}'] == 3
    assert seen['squall_choices_total{finish_reason="length",model="small"}'] == 4


async def test_each_way_to_end_is_counted_once_and_nothing_stays_in_flight(chat: Any, head: Any, scrape: Any) -> None:
    await chat(temperature="hot")
    await chat(model="other")
    for failure in (Rejected("full", reason="queue_full", retry_after_s=1.0), ReplicaFailed("gone"), ZeroDivisionError()):
        head.failures = {0: failure}
        await chat()
        await chat(stream=True)
    head.failures = {3: ReplicaFailed("gone")}
    await chat(stream=True)
    seen = await scrape()
    ended = {key: value for key, value in seen.items() if key.startswith("squall_requests_total") and value}
    assert ended == {
        'squall_requests_total{code="400",model="small",outcome="invalid"}': 1,
        'squall_requests_total{code="404",model="small",outcome="invalid"}': 1,
        'squall_requests_total{code="429",model="small",outcome="rejected"}': 2,
        'squall_requests_total{code="500",model="small",outcome="failed"}': 5,
    }
    assert seen['squall_rejections_total{model="small",reason="queue_full"}'] == 2
    assert seen['squall_requests_in_flight{model="small"}'] == 0


async def test_gauges_come_from_the_head_at_the_scrape(
    head: Any, chat: Any, client: httpx.AsyncClient, scrape: Any, until: Any
) -> None:
    head.gate = asyncio.Event()
    running = asyncio.create_task(chat())
    await until(lambda: bool(head.active))
    seen = await scrape()
    for name, value in (
        ('squall_requests_running{model="small"}', 1),
        ('squall_kv_usage_ratio{model="small"}', 0.04),
        ('squall_replica_kv_blocks_used{model="small",replica="0"}', 4),
        ('squall_preemptions_total{model="small"}', 3),
        ('vllm:num_requests_running{engine="0",model_name="small"}', 1),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="small"}', 0.04),
        ('vllm:gpu_cache_usage_perc{engine="0",model_name="small"}', 0.04),
        ('vllm:prefix_cache_queries_total{engine="0",model_name="small"}', 70),
        ('vllm:prefix_cache_hits_total{engine="0",model_name="small"}', 21),
        ('vllm:num_preemptions_total{engine="0",model_name="small"}', 3),
        ('vllm:cache_config_info{block_size="16",engine="0",model_name="small",num_gpu_blocks="100"}', 1),
    ):
        assert seen[name] == value
    head.gate.set()
    await running


async def test_the_aliases_say_what_our_own_names_say(chat: Any, scrape: Any) -> None:
    await chat(n=3)
    seen = await scrape()
    for own, alias in (
        ("squall_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("squall_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        ("squall_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ("squall_request_duration_seconds", "vllm:e2e_request_latency_seconds"),
        ("squall_queue_seconds", "vllm:request_queue_time_seconds"),
    ):
        for part in ("count", "sum"):
            assert seen[f'{alias}_{part}{{engine="0",model_name="small"}}'] == seen[f'{own}_{part}{{model="small"}}'] > 0
    assert seen['vllm:generation_tokens_total{engine="0",model_name="small"}'] == 24
    assert seen['vllm:request_success_total{engine="0",finished_reason="length",model_name="small"}'] == 3


async def test_the_aliases_can_be_switched_off(head: Any) -> None:
    app = create_app(head, Config(serve=Serve(vllm_metrics=False)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
        text = (await client.get("/metrics")).text
    assert "squall_requests_total" in text
    assert "vllm:" not in text


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"])
async def test_names_are_the_same_whatever_format_a_scraper_prefers(client: httpx.AsyncClient, accept: str) -> None:
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) > 40
    for family in families:
        assert re.fullmatch(r"squall_[a-z_]+|vllm:[a-z0-9_]+", family.name)
        assert family.documentation.endswith(".")


async def test_two_applications_in_one_process_share_nothing(make_head: Any) -> None:
    counts = []
    for requests in (2, 1):
        transport = httpx.ASGITransport(create_app(make_head(), Config()))
        async with httpx.AsyncClient(transport=transport, base_url="http://squall") as client:
            for _ in range(requests):
                await client.post("/v1/completions", json={"model": "small", "prompt": "hi"})
            counts.append(
                'squall_requests_total{code="200",model="small",outcome="completed"} 1.0' in (await client.get("/metrics")).text
            )
    assert counts == [False, True]


def test_buckets_of_token_counts_reach_the_longest_request() -> None:
    assert token_buckets(60) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(1) == [1]


async def test_every_metric_of_the_dashboard_and_the_rules_is_exported(client: httpx.AsyncClient) -> None:
    exported = {
        sample.name for family in text_string_to_metric_families((await client.get("/metrics")).text) for sample in family.samples
    }
    dashboard = json.loads((DEPLOY / "grafana/dashboards/squall.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {name for query in queries for name in re.findall(r"\b(?:squall_|vllm:)\w+", query)}
    assert len(named) >= 12
    assert named <= exported


def test_the_dashboard_can_be_provisioned() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/squall.json").read_text())
    assert dashboard["uid"] == "squall"
    assert {variable["name"] for variable in dashboard["templating"]["list"]} >= {"datasource", "model"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["datasource"]["uid"] == "$datasource" for panel in dashboard["panels"] if panel["type"] != "row")
