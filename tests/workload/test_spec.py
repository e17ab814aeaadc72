import math
from collections.abc import Callable

import msgspec
import pytest

from squall.errors import ConfigError
from squall.workload.spec import (
    BurstArrivals,
    ClosedLoop,
    FixedArrivals,
    FixedLength,
    GammaArrivals,
    LogNormalLength,
    MarkovArrivals,
    NamedWorkload,
    PoissonArrivals,
    QuantileLength,
    RateSeries,
    SessionsWorkload,
    SyntheticWorkload,
    TraceWorkload,
    UniformLength,
    Workload,
    ZipfLength,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedArrivals(0.0), "rate_rps is 0.0; it must be above 0"),
        (lambda: PoissonArrivals(-1.0), "rate_rps is -1.0"),
        (lambda: PoissonArrivals(math.nan), "rate_rps is nan"),
        (lambda: GammaArrivals(1.0, cv=0.0), "cv is 0.0"),
        (lambda: BurstArrivals(-1.0, 5.0, 1.0, 2.0), "rate_rps is -1.0; it must be 0 or more"),
        (lambda: BurstArrivals(1.0, 5.0, 3.0, 2.0), "burst_s is 3.0; it must be at most period_s, which is 2.0"),
        (lambda: PoissonArrivals(1e10), "rate_rps is 10000000000.0; it must be at most 1000000000"),
        (lambda: GammaArrivals(1.0, cv=1e-9), "cv is 1e-09; it must be from 0.001 to 1000"),
        (lambda: MarkovArrivals((1.0, 1e10), (1.0, 1.0)), "rates_rps is 10000000000.0; it must be at most 1000000000"),
        (lambda: ClosedLoop(10**9), "concurrency is 1000000000; it must be at most 20000000"),
        (lambda: FixedLength(1 << 33), "tokens is 8589934592; it must be at most 4294967296"),
        (lambda: LogNormalLength(5.0, 1.0, high=1 << 33), "high is 8589934592; it must be at most 4294967296"),
        (lambda: QuantileLength((0.0, 1.0), (1, 1 << 33)), "tokens is 8589934592; it must be at most 4294967296"),
        (
            lambda: SyntheticWorkload(FixedArrivals(1.0), FixedLength(1), FixedLength(1), 10**12),
            "num_requests is 1000000000000; it must",
        ),
        (lambda: TraceWorkload("x", rate_scale=1e-12), "rate_scale is 1e-12; it must be from 1e-09 to 1000000000"),
        (lambda: FixedLength(0), "tokens is 0"),
        (lambda: UniformLength(9, 3), "low is 9 and high is 3; low must be at least 1 and at most high"),
        (lambda: UniformLength(0, 3), "low is 0"),
        (lambda: LogNormalLength(0.0, 1.0), "median is 0.0"),
        (lambda: LogNormalLength(5.0, -1.0), "sigma is -1.0"),
        (lambda: ZipfLength(5, 3), "low is 5 and high is 3"),
        (lambda: ZipfLength(1, 1 << 30), "low is 1 and high is 1073741824; they must be less than"),
        (lambda: QuantileLength((0.0, 0.9), (1, 2)), r"at is \[0.0, 0.9\]; it must begin with 0, end with 1"),
        (lambda: QuantileLength((0.0, 1.0), (5, 2)), "at and tokens must ascend"),
        (lambda: MarkovArrivals((1.0,), (1.0,)), "rates_rps has 1 values and mean_stay_s 1"),
        (lambda: MarkovArrivals((1.0, 2.0), (1.0, 0.0)), r"mean_stay_s is \[1.0, 0.0\]; every stay must be above 0"),
        (lambda: MarkovArrivals((0.0, 0.0), (1.0, 1.0)), r"rates_rps is \[0.0, 0.0\]; rates must be 0 or more"),
        (lambda: RateSeries((1.0, math.nan)), r"rates_rps is \[1.0, nan\]"),
        (lambda: RateSeries(), "rates come from rates_rps, or from path and column; give one of them"),
        (lambda: RateSeries((1.0,), path="x", column="y"), "rates come from rates_rps, or from path and column"),
        (lambda: RateSeries(path="x"), "rates come from rates_rps, or from path and column"),
        (lambda: ClosedLoop(0), "concurrency is 0"),
        (lambda: ClosedLoop(1, think_s=-1.0), "think_s is -1.0"),
        (lambda: TraceWorkload("x", trace_block_size=0), "trace_block_size is 0"),
        (lambda: TraceWorkload("x", turns="wait", arrivals=FixedArrivals(1.0)), 'turns = "wait" needs the arrival times of the'),
        (
            lambda: SyntheticWorkload(ClosedLoop(4), FixedLength(1), FixedLength(1), duration_s=5.0),
            "num_requests is missing; these arrivals have no end of their own",
        ),
        (
            lambda: SyntheticWorkload(FixedArrivals(1.0), FixedLength(1), FixedLength(1), 5, max_total_tokens=1),
            "max_total_tokens is 1; it must be at least 2",
        ),
        (
            lambda: SessionsWorkload(FixedArrivals(1.0), FixedLength(1), FixedLength(1), FixedLength(1)),
            "num_sessions and duration_s are both missing",
        ),
        (lambda: NamedWorkload("bwb-4k", rate_scale=0.0), "rate_scale is 0.0"),
        (lambda: TraceWorkload("x", rate_scale=0.0), "rate_scale is 0.0"),
        (lambda: TraceWorkload("x", start_s=-1.0), "start_s is -1.0"),
        (lambda: TraceWorkload("x", duration_s=0.0), "duration_s is 0.0"),
        (lambda: TraceWorkload("x", max_requests=0), "max_requests is 0"),
        (lambda: TraceWorkload("x", format="xlsx"), "format is 'xlsx'; it must be one of auto, servegen, squall, vidur, azure"),
        (
            lambda: SyntheticWorkload(FixedArrivals(1.0), FixedLength(1), FixedLength(1)),
            "num_requests and duration_s are both missing",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named_by_its_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make()


def test_read_from_a_file_the_place_of_the_table_is_named_too() -> None:
    text = """
        kind = "synthetic"
        num_requests = 5
        arrivals = { kind = "poisson", rate_rps = -2.0 }
        prompt = { kind = "fixed", tokens = 5 }
        output = { kind = "fixed", tokens = 5 }
    """
    with pytest.raises(msgspec.ValidationError, match=r"rate_rps is -2.0; it must be above 0 - at `\$.arrivals`"):
        msgspec.toml.decode(text, type=Workload)
