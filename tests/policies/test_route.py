"""Route policies are arithmetic on a view, and are read from TOML."""

import msgspec
import pytest
from msgspec import Struct

from squall.core.types import Request
from squall.policies.route import LeastLoaded, Pull, RoundRobin, Route


class Seen(Struct):
    """A replica as a policy sees it."""

    replica: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_preempted: int = 0
    num_tokens: int = 0
    num_blocks: int = 100
    block_size: int = 16


class View(Struct):
    replicas: list[Seen]
    num_sent: int = 0


def test_least_loaded_counts_prompt_tokens_and_a_share_for_every_answer() -> None:
    policy = LeastLoaded(output_tokens=256)
    assert policy.rank(Seen(num_waiting=1, num_running=2, num_tokens=1000)) == 1000 + 3 * 256
    assert LeastLoaded(output_tokens=0).rank(Seen(num_running=2, num_tokens=1000)) == 1000


@pytest.mark.parametrize("policy", [LeastLoaded(max_waiting=4), Pull(max_outstanding=4)])
def test_a_full_replica_gets_nothing(policy: LeastLoaded | Pull) -> None:
    assert policy.rank(Seen(num_waiting=3)) is not None
    assert policy.rank(Seen(num_waiting=4)) is None


def test_pull_counts_running_requests_too_and_prefers_the_emptiest() -> None:
    policy = Pull(max_outstanding=4)
    assert policy.rank(Seen(num_waiting=1, num_running=1)) == 2
    assert policy.rank(Seen(num_waiting=1, num_running=3)) is None


def test_round_robin_goes_by_turns_and_waits_for_a_full_replica() -> None:
    request = Request(id=1, arrived_at=0, num_prompt_tokens=1, max_output_tokens=1)
    view = View([Seen(replica=2), Seen(replica=5), Seen(replica=9, num_waiting=256)])
    turns = []
    for view.num_sent in range(4):
        turns.append(RoundRobin().choose(request, view))
    assert turns == [2, 5, None, 2]


def test_a_policy_is_its_own_configuration() -> None:
    table = msgspec.toml.decode('kind = "least_loaded"\noutput_tokens = 64', type=Route)
    assert table == LeastLoaded(output_tokens=64)
    assert msgspec.toml.decode('kind = "pull"', type=Route) == Pull()


@pytest.mark.parametrize(
    "text", ['kind = "pull"\nmax_outstanding = 0', 'kind = "least_loaded"\nmax_waiting = 0', 'kind = "fastest"']
)
def test_a_policy_that_could_never_serve_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text, type=Route)
