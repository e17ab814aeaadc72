"""The requests that configurations are tried with: the same at every rate, only closer together."""

import pytest

from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.search.sample import sample_of, steady
from squall.workload.spec import OfferedRequest


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
