"""The requests that configurations are tried with: drawn once, arriving faster or more slowly, otherwise always the same.

At every rate the same requests arrive in the same order with the same pattern of gaps (common random numbers), so what is
compared are configurations and rates and not luck. A rate is the sample's own: requests by the time until the last of them, so
that a sample that happens to be dense does not stand for a lower rate than it is. Knows no configuration and no objective.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from hashlib import sha256

from msgspec import Struct
from msgspec.structs import replace

from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.workload.spec import NamedWorkload, OfferedRequest, SyntheticWorkload, Workload


class Sample(Struct, frozen=True):
    """Requests in order of arrival.

    Attributes:
        requests: with ids from 0, at the sample's own rate.
        rate_rps: that rate; 0 where all arrive at once.
        num_prompt_tokens, num_output_tokens: of all of them.
        context: tokens that decodes attend to, summed over all steps of all requests.
        own_context: of these, what no other request can have in the KV pool for it: all, but for prompts that may begin alike.
        digest: of the content: two samples with the same one are the same.
        whole: whether it is all of its workload.
        has_blocks: whether prompts may begin alike, so that their beginnings need not be computed.
    """

    requests: tuple[OfferedRequest, ...]
    rate_rps: float
    num_prompt_tokens: int
    num_output_tokens: int
    context: int
    own_context: int
    digest: str
    whole: bool = True
    has_blocks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether its requests are arrivals and lengths, and know of nothing else."""
        return all(not request.block_hashes and request.after < 0 and request.session == 0 for request in self.requests)

    @property
    def num_gaps(self) -> int:
        return self.num_output_tokens - len(self.requests)

    @property
    def waits(self) -> bool:
        """Whether some requests wait for the answers to others."""
        return any(request.after >= 0 for request in self.requests)

    @property
    def span_s(self) -> float:
        """Until the last arrival, at the sample's own rate."""
        return len(self.requests) / self.rate_rps if self.rate_rps else 0.0

    def at(self, rate_rps: float) -> list[OfferedRequest]:
        """The requests, arriving at that rate. Thinking takes its time at any rate."""
        slower = self.rate_rps / rate_rps
        return [replace_arrival(request, round(request.arrived_at * slower)) for request in self.requests]

    def first(self, count: int) -> Sample:
        """The first `count` requests as a sample of their own."""
        return sample_of(self.requests[:count])


def replace_arrival(request: OfferedRequest, at: int) -> OfferedRequest:
    """`request`, arriving at `at`."""
    return OfferedRequest(
        request.id, at, request.num_prompt_tokens, request.num_output_tokens, request.block_hashes, request.session,
        request.after, request.think, request.output_hashes,
    )  # fmt: skip


def sample_of(requests: Sequence[OfferedRequest]) -> Sample:
    """The sample that these requests are."""
    prompts = sum(request.num_prompt_tokens for request in requests)
    outputs = sum(request.num_output_tokens for request in requests)
    last = max((request.arrived_at for request in requests), default=0)
    # a decode's step attends to the prompt and what has been generated: outputs - 1 steps, from prompt + 1 tokens on
    generated = sum(r.num_output_tokens * (r.num_output_tokens - 1) // 2 for r in requests)
    prompt, own = (
        sum((r.num_output_tokens - 1) * r.num_prompt_tokens for r in some)
        for some in (requests, [r for r in requests if not r.block_hashes])
    )
    rate = len(requests) * SECOND / last if last else 0.0
    has_blocks = any(request.block_hashes for request in requests)
    return Sample(
        tuple(requests), rate, prompts, outputs, prompt + generated, own + generated, _digest(requests), has_blocks=has_blocks
    )


def lasting(least: int, wanted: float) -> int:
    """The next number of requests that is not below `wanted`: `least`, and from there in steps of half a doubling."""
    if not least or wanted <= least:
        return least
    return round(least * 2 ** (math.ceil(2 * math.log2(wanted / least) - 1e-9) / 2))


def longer(workload: Workload, count: int) -> Workload:
    """The workload with that many requests, if it is generated and ends by their number alone."""
    if not isinstance(workload, SyntheticWorkload | NamedWorkload) or workload.duration_s is not None:
        return workload
    if isinstance(workload, NamedWorkload) and (workload.path is not None or workload.arrivals is None):
        return workload  # of a file, or a window of so many requests
    if workload.num_requests is None or workload.num_requests >= count:
        return workload
    return replace(workload, num_requests=count)


def steady(requests: Sequence[OfferedRequest], count: int, warm_up: int) -> Sample:
    """A sample of `count` of the requests for a search of the rate.

    Lengths of a long workload are taken from all over it, where no request knows of others; arrivals are the first ones.

    Raises:
        ConfigError: there are not enough, or they all come at once.
    """
    if len(requests) <= warm_up:
        raise ConfigError(
            f"workload: it has {len(requests)} requests, and search.warm_up does not count the first {warm_up}; "
            "give it more requests, or a smaller search.warm_up"
        )
    taken = list(requests[:count])
    if all(not request.block_hashes and request.after < 0 and request.session == 0 for request in requests):
        spread = [requests[place * len(requests) // len(taken)] for place in range(len(taken))]
        taken = [
            replace(other, id=one.id, arrived_at=one.arrived_at) for one, other in zip(taken, spread, strict=True)
        ]  # fmt: skip
    sample = replace(sample_of(taken), whole=len(taken) == len(requests))
    if not sample.rate_rps:
        raise ConfigError(
            'workload: all requests arrive at once, so there is no rate to search for; give it arrivals such as kind = "poisson"'
        )
    return sample


def _digest(requests: Sequence[OfferedRequest]) -> str:
    columns = (
        [request.arrived_at for request in requests],
        [request.num_prompt_tokens for request in requests],
        [request.num_output_tokens for request in requests],
        [request.session for request in requests],
        [request.after for request in requests],
        [request.think for request in requests],
        [len(request.block_hashes) for request in requests],
        [value for request in requests for value in (*request.block_hashes, *request.output_hashes)],
    )
    content = sha256()
    for column in columns:
        content.update(array("q", [((value + (1 << 63)) % (1 << 64)) - (1 << 63) for value in column]).tobytes())
        content.update(b"|")
    return content.hexdigest()[:24]
