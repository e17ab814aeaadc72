import logging
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from squall.errors import ConfigError
from squall.workload.build import build
from squall.workload.named import KNOWN
from squall.workload.spec import NamedWorkload, OfferedRequest, PoissonArrivals, QuantileLength

SECOND = 1_000_000_000
PUBLISHED = {
    "chat-lmsys-1m": ((686, 417, 1678), (197, 139, 484)),
    "arxiv-4k": ((2588, 2730, 3702), (291, 167, 372)),
    "bwb-4k": ((1067, 1037, 1453), (1612, 1601, 2149)),
}
"""Mean, median and 90th percentile of prompts and of outputs, from table 1 of the Vidur paper."""

WINDOWS = {"AzureCode2023-90sec": "code", "AzureCode2023-130sec": "code", "AzureConv2023-5min": "conv"}


def lengths(requests: list[OfferedRequest]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array([r.num_prompt_tokens for r in requests]), np.array([r.num_output_tokens for r in requests])]


def mean(length: QuantileLength) -> float:
    """Between two quantiles the logarithm is even, so the mean there is the logarithmic one."""
    pairs = zip(pairwise(length.at), pairwise(length.tokens), strict=True)
    return sum((to - at) * (high if low == high else (high - low) / math.log(high / low)) for (at, to), (low, high) in pairs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_generators_of_lengths_have_the_published_statistics(name: str) -> None:
    known = KNOWN[name]
    for length, (average, median, p90) in zip((known.prompt, known.output), PUBLISHED[name], strict=True):
        assert mean(length) == pytest.approx(average, rel=0.03)
        assert dict(zip(length.at, length.tokens, strict=True))[0.5] == median
        assert dict(zip(length.at, length.tokens, strict=True))[0.9] == p90


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_requests_fit_and_stay_close_to_the_published_statistics(name: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = build(NamedWorkload(name, arrivals=PoissonArrivals(5.0), num_requests=20_000), 0, Path())
    for drawn, published in zip(lengths(requests), PUBLISHED[name], strict=True):
        assert [drawn.mean(), *np.quantile(drawn, [0.5, 0.9])] == pytest.approx(published, rel=0.055)
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in requests) <= 4096
    assert caplog.messages == [
        f"workload {name}: generated with the statistics of the Vidur paper, table 1; its own requests come with workload.path"
    ]


@pytest.mark.parametrize("name", WINDOWS)
def test_the_azure_windows_are_generated_at_their_rates_and_the_run_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = build(NamedWorkload(name), 1, Path())
    known = KNOWN[name]
    assert len(requests) == pytest.approx(known.num_requests, rel=0.1)
    assert requests[-1].arrived_at < known.duration_s * SECOND
    for drawn, length in zip(lengths(requests), (known.prompt, known.output), strict=True):
        assert drawn.mean() == pytest.approx(mean(length), rel=0.15)
    assert "generated with the statistics of the Azure" in caplog.text


@pytest.mark.shared
@pytest.mark.parametrize("name", WINDOWS)
def test_the_azure_windows_are_the_busiest_of_the_real_trace(shared: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = str(shared / "data" / "traces" / f"azure2023_{WINDOWS[name]}.csv")
    known = KNOWN[name]
    requests = build(NamedWorkload(name, path), 0, Path())
    assert len(requests) == known.num_requests
    counts = np.bincount([int(r.arrived_at / SECOND / known.step_s) for r in requests], minlength=len(known.rates_rps))
    assert (counts / known.step_s).tolist() == list(known.rates_rps)
    for drawn, length in zip(lengths(requests), (known.prompt, known.output), strict=True):
        assert np.quantile(drawn, length.at).round().astype(int).tolist() == list(length.tokens)
    assert not caplog.records
    everything = build(NamedWorkload(name, path, rate_scale=2.0), 0, Path())
    assert everything[-1].arrived_at == pytest.approx(requests[-1].arrived_at / 2)


@pytest.mark.shared
def test_arxiv_lengths_come_from_the_user_s_file(shared: Path) -> None:
    path = shared / "data" / "traces" / "vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
    prompts, outputs = lengths(build(NamedWorkload("arxiv-4k", str(path), arrivals=PoissonArrivals(1.0)), 0, Path()))
    known = KNOWN["arxiv-4k"]
    assert len(prompts) == 28_257
    assert np.quantile(prompts, known.prompt.at) == pytest.approx(known.prompt.tokens, abs=0.6)
    assert np.quantile(outputs, known.output.at) == pytest.approx(known.output.tokens, abs=0.6)


def test_scaling_and_shortening_a_generated_window() -> None:
    whole = build(NamedWorkload("AzureConv2023-5min"), 1, Path())
    fast = build(NamedWorkload("AzureConv2023-5min", rate_scale=4.0), 1, Path())
    assert [r.arrived_at for r in fast] == pytest.approx([r.arrived_at / 4 for r in whole], abs=1)
    short = build(NamedWorkload("AzureConv2023-5min", duration_s=60.0, rate_scale=4.0), 1, Path())
    assert short == [r for r in fast if r.arrived_at < 15 * SECOND]


def test_another_trace_under_the_name_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n860,5,5\n")
    with caplog.at_level(logging.WARNING):
        build(NamedWorkload("AzureCode2023-90sec", "other.csv"), 0, tmp_path)
    assert caplog.messages == [
        "workload AzureCode2023-90sec: other.csv has 1 requests there, the Azure code trace of 2023, 90 s from 850 s on has 920"
    ]


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"workload.name is 'sharegpt'; known are chat-lmsys-1m, arxiv-4k"):
        build(NamedWorkload("sharegpt"), 0, Path())
    with pytest.raises(ConfigError, match=r"bwb-4k says how long requests are, not when they come; add \[workload.arrivals\]"):
        build(NamedWorkload("bwb-4k"), 0, Path())
    with pytest.raises(ConfigError, match=r"num_requests and duration_s are both missing"):
        build(NamedWorkload("bwb-4k", arrivals=PoissonArrivals(1.0)), 0, Path())
    with pytest.raises(ConfigError, match=r"put the rate that you want into arrivals"):
        build(NamedWorkload("bwb-4k", arrivals=PoissonArrivals(1.0), num_requests=1, rate_scale=2.0), 0, Path())
