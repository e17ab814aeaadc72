"""What `[search]` may say, and what it means."""

import re

import pytest

from squall.config import Slo
from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.search.spec import Limit, limit, quantile_of, read_search


@pytest.mark.parametrize(
    ("name", "metric", "quantile"),
    [("ttft_p90", "ttft", 0.9), ("tbt_p99", "tbt", 0.99), ("e2e_p999", "e2e", 0.999), ("queue_p5", "queue", 0.05),
     ("tpot_p100", "tpot", 1.0), ("ttft_p50", "ttft", 0.5)],
)  # fmt: skip
def test_a_name_is_a_metric_and_a_quantile(name: str, metric: str, quantile: float) -> None:
    found = quantile_of(name)
    assert found[0] == metric
    assert found[1] == pytest.approx(quantile)


@pytest.mark.parametrize("name", ["ttft", "ttft_p", "ttft_p0", "latency_p90", "ttft_90"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        quantile_of(name)


def test_a_limit_says_how_many_must_keep_it() -> None:
    found = limit("ttft_p90_s", 2)
    assert found == Limit("ttft", 0.9, 2 * SECOND)
    assert [found.needed(count) for count in (0, 1, 10, 11, 100)] == [0, 1, 9, 10, 90]
    assert found.name == "ttft_p90"
    assert Limit("e2e", 0.999, 1).name == "e2e_p999"


def test_slo_and_search_slo_hold_together() -> None:
    slo = Slo(ttft_s=1.0, attainment=0.95, tbt_p99_s=0.2)
    found = read_search("f", {"slo": {"e2e_p999_s": 9}}).limits(slo)
    assert [(one.metric, one.quantile) for one in found] == [("tbt", 0.99), ("e2e", 0.999), ("slo", 0.95)]


def test_vidurs_criterion_is_the_queue_alone() -> None:
    search = read_search("f", {"criterion": "vidur", "slo": {"ttft_p90_s": 1}})
    assert search.limits(Slo(ttft_s=1.0)) == (Limit("queue", 0.99, 5 * SECOND),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"objectiv": "usd"}, r"\[search\] has no key 'objectiv'; did you mean 'objective'\?"),
        ({"objective": "cheap"}, "search.objective = 'cheap': unknown value 'cheap'; one of qps_per_usd, usd, gpu_hours"),
        ({"slo": {"ttft_p90": 1}}, "limits are in seconds, as ttft_p90_s"),
        ({"slo": {"ttft_p90_s": 0}}, "ttft_p90_s is 0.*above 0"),
        ({"warm_up": 800}, "warm_up is 800; it must be below num_requests"),
        ({"latency_of": "speed"}, "'speed' is no metric"),
        ({"prices": {"h100": {"on_demand": -1}}}, "search.prices"),
    ],
)
def test_mistakes_are_one_line(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_search("file.toml", table)
    assert str(error.value).startswith(("file.toml: search", "file.toml: [search"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("budget_usd_per_hour", 1e300, "at most 1000000000000000"),
        ("max_gpus_per_replica", 9 * 10**18, "<= 1024"),
        ("max_gpus", 9 * 10**18, "<= 100000"),
        ("num_requests", 9 * 10**18, "<= 20000000"),
        ("span_s", 1e300, "at most 9000000000 seconds"),
        ("seeds", 9 * 10**18, "<= 1000"),
        ("top", 9 * 10**18, "<= 1000000"),
        ("round", 9 * 10**18, "<= 1000000"),
        ("trials", 9 * 10**18, "<= 1000000"),
        ("warm_up", 9 * 10**18, "must be below num_requests"),
    ],
)
def test_an_absurd_number_is_refused_with_key_and_range(key: str, value: float, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"search.*\b{key}\b.*{right}"):
        read_search("file", {key: value})
