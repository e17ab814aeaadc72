"""Well-known workloads by name: the file that each is taken from, or a generator with its published statistics.

- chat-lmsys-1m, arxiv-4k, bwb-4k: lengths of at most 4096 tokens together, arrivals are the user's. Statistics: mean, median and
  90th percentile of table 1 of the Vidur paper (Agrawal and others, MLSys 2024, arXiv:2405.05465) as LMSys-Chat-1M-4K,
  Arxiv-Summarization-4K and Bilingual-Web-Book-4K; for arxiv-4k more percentiles of the file that comes with Vidur. The first and
  last quantile of the other two are ours: such that the mean comes out. Prompt and output are drawn
  independently, and the prompt is cut where both do not fit: arxiv-4k's mean prompt comes out 3 % short.
- AzureCode2023-90sec, AzureCode2023-130sec, AzureConv2023-5min: of the stretches of this length that begin at a multiple of ten
  seconds, the one with the most requests in the Azure traces of 2023 (github.com/Azure/AzurePublicDataset, CC-BY-4.0). The names
  are BlitzScale's, who did not publish theirs. Without the file: Poisson at the rates of that stretch, lengths by percentiles.
"""

from msgspec import Struct

from squall.errors import ConfigError
from squall.workload.spec import NamedWorkload, QuantileLength, RateSeries, SyntheticWorkload, TraceWorkload

_PUBLISHED = (0.0, 0.5, 0.9, 1.0)
_FILE = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
_MEASURED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class Known(Struct, frozen=True):
    """What is known of a workload.

    Attributes:
        source: of the statistics, in words.
        prompt, output: lengths.
        max_total_tokens: of both together.
        start_s: where in its trace it begins; the next three belong to it.
        rates_rps, step_s: arrivals.
        num_requests: in the trace.
    """

    source: str
    prompt: QuantileLength
    output: QuantileLength
    max_total_tokens: int | None = 4096
    start_s: float = 0.0
    rates_rps: tuple[float, ...] = ()
    step_s: float = 5.0
    num_requests: int = 0

    @property
    def duration_s(self) -> float:
        return self.step_s * len(self.rates_rps)


def _window(
    trace: str, start_s: float, step_s: float, counts: tuple[int, ...], prompt: tuple[int, ...], output: tuple[int, ...]
) -> Known:
    return Known(
        f"the Azure {trace} trace of 2023, {step_s * len(counts):g} s from {start_s:g} s on",
        QuantileLength(_MEASURED, prompt),
        QuantileLength(_MEASURED, output),
        None,
        start_s,
        tuple(count / step_s for count in counts),
        step_s,
        sum(counts),
    )


KNOWN = {
    "chat-lmsys-1m": Known(
        "the Vidur paper, table 1",
        QuantileLength(_PUBLISHED, (9, 417, 1678, 4090)),
        QuantileLength(_PUBLISHED, (1, 139, 484, 1030)),
    ),
    "arxiv-4k": Known(
        "the Vidur paper, table 1",
        QuantileLength(_FILE, (1, 73, 749, 1242, 1986, 2730, 3370, 3702, 3813, 3892, 3933, 4054)),
        QuantileLength(_FILE, (5, 36, 60, 78, 115, 167, 242, 372, 736, 2775, 3271, 4056)),
    ),
    "bwb-4k": Known(
        "the Vidur paper, table 1",
        QuantileLength(_PUBLISHED, (553, 1037, 1453, 2400)),
        QuantileLength(_PUBLISHED, (913, 1601, 2149, 3000)),
    ),
    "AzureCode2023-90sec": _window(
        "code", 850, 5,
        (43, 123, 268, 59, 28, 30, 13, 8, 2, 47, 25, 15, 41, 72, 69, 46, 31, 0),
        (15, 236, 640, 941, 1187, 1605, 1897, 2356, 2948, 4421, 6555, 7436, 7437),
        (6, 6, 8, 9, 10, 12, 15, 18, 27, 53, 84, 213, 928),
    ),
    "AzureCode2023-130sec": _window(
        "code", 550, 5,
        (0, 28, 35, 44, 163, 71, 104, 31, 0, 0, 25, 63, 69, 63, 67, 40, 0, 24, 44, 8, 0, 18, 0, 22, 35, 6),
        (6, 158, 442, 751, 1012, 1206, 1692, 2277, 2773, 4122, 6056, 7436, 7437),
        (6, 7, 8, 9, 11, 13, 16, 21, 30, 60, 106, 290, 1899),
    ),
    "AzureConv2023-5min": _window(
        "conversation", 1640, 10,
        (83, 83, 87, 85, 88, 83, 81, 68, 71, 85, 77, 70, 83, 63, 78, 82, 60, 83, 75, 69, 88, 73, 85, 98, 88, 75, 86, 75, 65, 85),
        (2, 375, 386, 398, 406, 430, 1046, 1315, 4073, 4084, 4091, 4143, 5380),
        (12, 45, 58, 72, 83, 91, 98, 110, 142, 394, 415, 544, 939),
    ),
}  # fmt: skip


def resolve(workload: NamedWorkload) -> tuple[TraceWorkload | SyntheticWorkload, str]:
    """What a name stands for, and what a run should say about it (nothing where a file is read).

    Raises ConfigError for an unknown name, and for lengths alone without arrivals.
    """
    known = KNOWN.get(workload.name)
    if known is None:
        raise ConfigError(f"workload.name is {workload.name!r}; known are {', '.join(KNOWN)}")
    if workload.arrivals is None and not known.rates_rps and workload.path is None:
        raise ConfigError(f"workload: {workload.name} says how long requests are, not when they come; add [workload.arrivals]")
    if workload.path is not None:
        return _recorded(workload, workload.path, known), ""
    said = f"workload {workload.name}: generated with the statistics of {known.source}; its own requests come with workload.path"
    return _generated(workload, known), said


def doubt(workload: NamedWorkload, num_requests: int) -> str:
    """What a run should say where a whole window was read from a file and does not hold what it should; nothing otherwise."""
    known = KNOWN[workload.name]
    whole = workload.path is not None and workload.num_requests is None and workload.duration_s is None
    if not whole or known.num_requests in (0, num_requests):
        return ""
    return f"workload {workload.name}: {workload.path} has {num_requests} requests there, {known.source} has {known.num_requests}"


def _recorded(workload: NamedWorkload, path: str, known: Known) -> TraceWorkload:
    duration_s = min(workload.duration_s or known.duration_s, known.duration_s) if known.rates_rps else workload.duration_s
    return TraceWorkload(
        path,
        arrivals=workload.arrivals,
        rate_scale=workload.rate_scale,
        start_s=known.start_s,
        duration_s=duration_s,
        max_requests=workload.num_requests,
    )


def _generated(workload: NamedWorkload, known: Known) -> SyntheticWorkload:
    arrivals, scale = workload.arrivals, workload.rate_scale
    if arrivals is None:
        arrivals = RateSeries(known.rates_rps, step_s=known.step_s / scale, rate_scale=scale)
    elif scale != 1:
        raise ConfigError(
            "workload.rate_scale is for the times that belong to the name; put the rate that you want into arrivals"
        )
    return SyntheticWorkload(
        arrivals,
        known.prompt,
        known.output,
        num_requests=workload.num_requests,
        duration_s=None if workload.duration_s is None else workload.duration_s / scale,
        max_total_tokens=known.max_total_tokens,
    )
