"""The requests that configurations are tried with: the same at every rate, only closer together."""

from typing import Any

import msgspec
import pytest

from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.search.sample import lasting, longer, sample_of, steady
from squall.search.setting import Workshop
from squall.workload.spec import OfferedRequest, Workload
from tests.search.conftest import job, question, setting


def requests(count: int, gap_s: float = 0.5) -> list[OfferedRequest]:
    return [OfferedRequest(i, round((i + 1) * gap_s * SECOND), 100 + i, 10) for i in range(count)]


def test_a_rate_is_the_samples_own() -> None:
    sample = sample_of(requests(10))
    assert sample.rate_rps == 2.0
    assert sample.span_s == 5.0
    faster = sample.at(4.0)
    assert [request.arrived_at for request in faster] == [round((i + 1) * 0.25 * SECOND) for i in range(10)]
    assert [request.num_prompt_tokens for request in faster] == [100 + i for i in range(10)]


def test_totals() -> None:
    sample = sample_of([OfferedRequest(0, SECOND, 5, 3), OfferedRequest(1, SECOND, 7, 1)])
    assert (sample.num_prompt_tokens, sample.num_output_tokens, sample.num_gaps) == (12, 4, 2)
    assert sample.context == 6 + 7  # the first request's two decodes; the other has none


def test_lengths_of_a_long_workload_come_from_all_over_it() -> None:
    sample = steady(requests(100), 4, 1)
    assert [request.num_prompt_tokens for request in sample.requests] == [100, 125, 150, 175]
    assert [request.arrived_at for request in sample.requests] == [round((i + 1) * 0.5 * SECOND) for i in range(4)]
    assert [request.id for request in sample.requests] == [0, 1, 2, 3]


def test_but_not_where_requests_know_of_each_other() -> None:
    told = [OfferedRequest(i, (i + 1) * SECOND, 10 + i, 2, session=1) for i in range(10)]
    assert [request.num_prompt_tokens for request in steady(told, 3, 0).requests] == [10, 11, 12]


def test_a_workload_shorter_than_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it has 5 requests, and search.warm_up does not count the first 5"):
        steady(requests(5), 100, 5)


def test_so_is_one_without_a_rate() -> None:
    with pytest.raises(ConfigError, match="no rate to search for"):
        steady([OfferedRequest(i, 0, 10, 2) for i in range(9)], 9, 0)


def test_the_digest_is_of_the_content() -> None:
    one, other = sample_of(requests(5)), sample_of(requests(5))
    assert one.digest == other.digest
    assert one.digest != sample_of(requests(6)).digest
    hashed = [OfferedRequest(i, (i + 1) * SECOND, 16, 2, block_hashes=((1 << 64) - 1,)) for i in range(5)]
    assert sample_of(hashed).digest != one.digest


def test_the_next_number_of_requests() -> None:
    assert [lasting(800, wanted) for wanted in (10, 800, 801, 1131, 1132, 1600, 1601)] == [800, 800, 1131, 1131, 1600, 1600, 2263]
    assert lasting(0, 1e6) == 0  # all of a workload that is played as it is


def test_what_is_generated_can_be_longer_and_what_is_recorded_cannot() -> None:
    drawn = {"kind": "synthetic", "num_requests": 5, "arrivals": {"kind": "poisson", "rate_rps": 1.0},
             "prompt": {"kind": "fixed", "tokens": 9}, "output": {"kind": "fixed", "tokens": 9}}  # fmt: skip
    named = {"kind": "named", "name": "bwb-4k", "num_requests": 5, "arrivals": {"kind": "poisson", "rate_rps": 1.0}}
    for table, number in [
        (drawn, 50),
        (drawn | {"num_requests": 60}, 60),
        (drawn | {"duration_s": 5.0}, 5),
        (named, 50),
        (named | {"path": "file.csv"}, 5),
        ({"kind": "named", "name": "AzureCode2023-90sec", "num_requests": 5}, 5),
    ]:
        made: Any = longer(msgspec.convert(table, Workload), 50)
        assert made.num_requests == number
    traced = msgspec.convert({"kind": "trace", "path": "file.csv"}, Workload)
    assert longer(traced, 50) is traced


def test_a_configuration_that_may_be_fast_is_tried_with_more_requests() -> None:
    short, long = setting(), Workshop(question()).setting(job(span_s=100.0))
    assert len(short.sample.requests) == 60
    assert len(long.sample.requests) == lasting(60, 100 * short.highest_rps) >= 100 * short.highest_rps > 120
    assert long.warm_up == len(long.sample.requests) // 10
    assert long.highest_rps == pytest.approx(short.highest_rps, rel=0.3)  # other requests, a little other work
