"""Route policies are arithmetic on a view, and are read from TOML."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from squall.config import Config, dumps, load
from squall.core.types import ReplicaId, Request
from squall.policies.route import (
    MAX_HOMES,
    LeastKv,
    LeastLoaded,
    LeastOutstanding,
    PowerOfTwo,
    PrefixAffinity,
    Pull,
    Random,
    RoundRobin,
    Route,
    Session,
    homes,
)


class Seen(Struct):
    """A replica as a policy sees it."""

    replica: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_preempted: int = 0
    num_tokens: int = 0
    num_promised: int = 0
    num_blocks: int = 100
    block_size: int = 16


class View(Struct):
    """Satisfies `RouteView`: a list is scanned, and what was sent before is what the test says."""

    replicas: list[Seen]
    num_sent: int = 0
    policy: Route = field(default_factory=LeastLoaded)
    holders: tuple[ReplicaId, ...] = ()

    @property
    def lowest(self) -> Seen | None:
        if isinstance(self.policy, RoundRobin):
            return None
        ranked = [(rank, seen.replica) for seen in self.replicas if (rank := self.policy.rank(seen)) is not None]
        return self.get(min(ranked)[1]) if ranked else None

    def get(self, replica: ReplicaId, /) -> Seen | None:
        return next((seen for seen in self.replicas if seen.replica == replica), None)

    def longest_prefix(self, _request: Request, /) -> tuple[int, Sequence[Seen]]:
        return len(self.holders), [seen for seen in self.replicas if seen.replica in self.holders]


def request(id: int = 1, session: int = 0) -> Request:
    return Request(id=id, arrived_at=0, num_prompt_tokens=1, max_output_tokens=1, session=session)


def loads(policy: Route, *tokens: int, holders: tuple[ReplicaId, ...] = ()) -> View:
    """Replicas 0, 1, ... with so many tokens promised."""
    return View([Seen(replica, num_tokens=number) for replica, number in enumerate(tokens)], 0, policy, holders)


# -- ranks


def test_least_loaded_counts_prompt_tokens_and_a_share_for_every_answer() -> None:
    policy = LeastLoaded(output_tokens=256)
    assert policy.rank(Seen(num_waiting=1, num_running=2, num_tokens=1000)) == 1000 + 3 * 256
    assert LeastLoaded(output_tokens=0).rank(Seen(num_running=2, num_tokens=1000)) == 1000


def test_least_outstanding_counts_requests_whatever_their_length() -> None:
    assert LeastOutstanding().rank(Seen(num_waiting=1, num_running=2, num_tokens=90_000)) == 3


@pytest.mark.parametrize(
    "policy",
    [
        LeastLoaded(max_waiting=4), LeastKv(max_waiting=4, output_tokens=0), LeastOutstanding(max_waiting=4), Pull(4),
        Random(max_waiting=4), PowerOfTwo(max_waiting=4), Session(max_waiting=4), PrefixAffinity(max_waiting=4),
    ],
)  # fmt: skip
def test_a_full_replica_gets_nothing(policy: LeastLoaded | LeastKv | Random | Session | Pull) -> None:
    assert policy.rank(Seen(num_waiting=3)) is not None
    assert policy.rank(Seen(num_waiting=4)) is None


def test_pull_counts_running_requests_too_and_prefers_the_emptiest() -> None:
    policy = Pull(max_outstanding=4)
    assert policy.rank(Seen(num_waiting=1, num_running=1)) == 2
    assert policy.rank(Seen(num_waiting=1, num_running=3)) is None


def test_least_kv_measures_by_the_pool_and_holds_back_at_a_full_one() -> None:
    policy = LeastKv(output_tokens=100)
    assert policy.rank(Seen(num_running=2, num_tokens=600)) == 0.5
    assert policy.rank(Seen(num_running=2, num_tokens=600, num_blocks=200)) == 0.25
    assert policy.rank(Seen(num_running=2, num_tokens=1399)) == 1599 / 1600
    assert policy.rank(Seen(num_running=2, num_tokens=1400)) is None
    assert LeastKv(output_tokens=100, max_share=2).rank(Seen(num_running=2, num_tokens=1400)) == 1.0


def test_least_kv_avoids_a_replica_that_has_preempted_before_any_other() -> None:
    """More requests are running there than fit, whatever was promised."""
    policy = LeastKv(output_tokens=0)
    torn, nearly_full = policy.rank(Seen(num_running=2, num_preempted=1)), policy.rank(Seen(num_running=2, num_tokens=1590))
    assert torn is not None
    assert nearly_full is not None
    assert torn > nearly_full


# -- by turns and by hash


def test_round_robin_goes_by_turns_and_waits_for_a_full_replica() -> None:
    view = View([Seen(replica=2), Seen(replica=5), Seen(replica=9, num_waiting=256)])
    turns = []
    for view.num_sent in range(4):
        turns.append(RoundRobin().choose(request(), view))
    assert turns == [2, 5, None, 2]


def test_random_is_even_and_the_same_every_time_and_another_with_another_seed() -> None:
    view = loads(Random(), *[0] * 10)
    drawn = [Random().choose(request(id), view) for id in range(5000)]
    assert all(430 < count < 570 for count in Counter(drawn).values())  # 500 and three standard deviations of 21
    assert [Random().choose(request(id), view) for id in range(50)] == drawn[:50]
    assert [Random(seed=1).choose(request(id), view) for id in range(50)] != drawn[:50]


def test_random_passes_over_a_full_replica_and_waits_when_all_are() -> None:
    policy = Random(max_waiting=1)
    view = View([Seen(0, num_waiting=1), Seen(1)], policy=policy)
    assert {policy.choose(request(id), view) for id in range(20)} == {1}
    view.replicas[1].num_waiting = 1
    assert policy.choose(request(), view) is None


def test_of_two_that_are_drawn_the_less_loaded_wins() -> None:
    policy = PowerOfTwo()
    view = loads(policy, *range(10))
    counts = Counter(policy.choose(request(id), view) for id in range(9000))
    assert 9 not in counts  # the most loaded is never the less loaded of two
    # the j-th most loaded beats j of the 45 pairs it is in: 200 a pair
    assert all(abs(counts[9 - j] - 200 * j) < 3 * (200 * j) ** 0.5 for j in range(1, 10))


def test_two_choices_know_a_full_one_and_a_single_replica() -> None:
    policy = PowerOfTwo(max_waiting=1)
    view = View([Seen(0, num_waiting=1), Seen(1, num_waiting=1), Seen(2, num_tokens=9)], policy=policy)
    assert {policy.choose(request(id), view) for id in range(20)} == {2}
    view.replicas.pop()
    assert policy.choose(request(), view) is None
    assert policy.choose(request(), loads(policy, 5)) == 0


# -- sessions


def test_a_session_stays_whatever_the_load_until_its_replica_is_hot() -> None:
    policy = Session(max_ratio=2, max_excess=100)
    home = next(homes(7, 4))
    view = loads(policy, 50, 50, 50, 50)
    assert {policy.choose(request(id, session=7), view) for id in range(9)} == {home}
    view.replicas[home].num_tokens = 200  # 2 * 50 + 100
    assert policy.choose(request(session=7), view) == home
    view.replicas[home].num_tokens = 201
    second = policy.choose(request(session=7), view)
    assert second == next(replica for replica in homes(7, 4) if replica != home)


def test_without_a_session_and_with_all_its_replicas_hot_the_least_loaded_gets_it() -> None:
    policy = Session(max_ratio=1, max_excess=0)
    view = loads(policy, *[10] * 50)
    spare = next(replica for replica in range(50) if replica not in set(homes(3, 50)))
    view.replicas[spare].num_tokens = 9
    assert policy.choose(request(session=3), view) == spare
    assert policy.choose(request(), view) == spare


def test_when_a_replica_goes_only_its_sessions_move_and_when_it_is_back_they_are() -> None:
    policy = Session()
    whole = loads(policy, *[0] * 8)
    before = [policy.choose(request(session=s), whole) for s in range(1, 801)]
    without = View([seen for seen in whole.replicas if seen.replica != 3], policy=policy)
    during = [policy.choose(request(session=s), without) for s in range(1, 801)]
    moved = [(then, now) for then, now in zip(before, during, strict=True) if then != now]
    assert {then for then, _ in moved} == {3}
    assert 60 < len(moved) < 140
    assert len({now for _, now in moved}) == 7  # not all to one
    assert [policy.choose(request(session=s), whole) for s in range(1, 801)] == before


@given(session=st.integers(1, 2**63 - 1), span=st.integers(1, 2000))
def test_a_new_replica_takes_sessions_over_and_moves_no_others(session: int, span: int) -> None:
    fewer, more = list(homes(session, span)), list(homes(session, span + 1))
    assert len(fewer) == MAX_HOMES
    assert all(now in (then, span) for then, now in zip(fewer, more, strict=True))
    assert all(0 <= home < span for home in fewer)


def test_sessions_are_spread_evenly() -> None:
    counts = Counter(next(homes(session, 20)) for session in range(20_000))
    assert all(900 < counts[replica] < 1100 for replica in range(20))


# -- prefixes


def test_the_least_loaded_of_those_that_have_the_beginning_gets_it() -> None:
    policy = PrefixAffinity()
    assert policy.choose(request(), loads(policy, 0, 900, 800, 700, holders=(1, 2))) == 2


def test_a_miss_goes_to_the_least_loaded() -> None:
    """Field issue 42: not to whoever holds least, which would be the one that has just come up or was just overwhelmed."""
    policy = PrefixAffinity()
    assert policy.choose(request(), loads(policy, 30, 10, 20)) == 1


def test_a_hot_replica_gets_nothing_for_what_it_has() -> None:
    policy = PrefixAffinity(max_ratio=2, max_excess=100)
    assert policy.choose(request(), loads(policy, 300, 100, holders=(0,))) == 0
    assert policy.choose(request(), loads(policy, 301, 100, holders=(0,))) == 1
    assert policy.choose(request(), loads(policy, 301, 100, 299, holders=(0, 2))) == 2


def test_a_full_replica_gets_nothing_for_what_it_has_and_all_full_ones_let_it_wait() -> None:
    policy = PrefixAffinity(max_waiting=1)
    view = View([Seen(0, num_waiting=1), Seen(1)], policy=policy, holders=(0,))
    assert policy.choose(request(), view) == 1
    view.replicas[1].num_waiting = 1
    assert policy.choose(request(), view) is None


# -- as configuration

OTHERS: list[Route] = [
    RoundRobin(7), LeastLoaded(64, 7), LeastKv(64, 1.25, 7), LeastOutstanding(7), Random(3, 7), PowerOfTwo(3, 64, 7),
    Session(2.5, 100, 64, 7), PrefixAffinity(2.5, 100, 64, 7, 32), Pull(7),
]  # fmt: skip


@pytest.mark.parametrize("policy", OTHERS, ids=lambda policy: type(policy).__name__)
def test_every_kind_survives_the_configuration(policy: Route, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dumps(Config(route=policy)))
    assert load(path).route == policy
    kind = type(policy).__struct_config__.tag
    assert load(None, [f"route.kind={kind}"]).route == type(policy)()


def test_a_policy_is_its_own_configuration() -> None:
    table = msgspec.toml.decode('kind = "least_loaded"\noutput_tokens = 64', type=Route)
    assert table == LeastLoaded(output_tokens=64)
    assert msgspec.toml.decode('kind = "pull"', type=Route) == Pull()


@pytest.mark.parametrize(
    "text",
    [
        'kind = "pull"\nmax_outstanding = 0',
        'kind = "least_loaded"\nmax_waiting = 0',
        'kind = "least_kv"\nmax_share = 0.0',
        'kind = "session"\nmax_ratio = 0.5',
        'kind = "prefix_affinity"\nprefix_apart = 0',
        'kind = "random"\nseed = -1',
        'kind = "fastest"',
    ],
)
def test_a_policy_that_could_never_serve_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text, type=Route)
