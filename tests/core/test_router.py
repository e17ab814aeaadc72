"""The router: actions against actions, and what must hold whatever happens."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from squall.core.actions import AnyAction, Reply, Send
from squall.core.events import (
    Arrived,
    Cancelled,
    DrainWanted,
    Emptied,
    Progressed,
    Rejection,
    ReplicaDown,
    ReplicaUp,
    StepsDone,
    Submitted,
    Woke,
)
from squall.core.fleet_view import ReplicaView, RoutePolicy, RouteView
from squall.core.replica_index import Ranked
from squall.core.router import Router
from squall.core.types import CONTROLLER, SECOND, ReplicaId, Request, RequestId
from squall.errors import ConfigError, IllegalTransition
from squall.policies.route import (
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
)


def request(id: RequestId, prompt: int = 100, output: int = 50) -> Request:
    return Request(id=id, arrived_at=0, num_prompt_tokens=prompt, max_output_tokens=output)


def router(
    policy: RoutePolicy | None = None, replicas: int = 0, max_requests: int = 100, max_tokens: int = 10**6, max_retries: int = 2
) -> Router:
    """A router with so many replicas up, each with room for 1,600 tokens."""
    made = Router(policy or LeastLoaded(), max_requests, max_tokens, max_retries)
    for replica in range(replicas):
        assert made.handle(up(replica), 0) == []
    return made


def up(replica: ReplicaId, num_blocks: int = 100) -> ReplicaUp:
    return ReplicaUp(replica, num_blocks, block_size=16)


def sent(replica: ReplicaId, id: RequestId, prompt: int = 100, output: int = 50) -> Send:
    return Send(replica, Submitted(request(id, prompt, output)))


def arrive(router: Router, *ids: RequestId, now: int = 0, prompt: int = 100) -> list[AnyAction]:
    return [action for id in ids for action in router.handle(Arrived(request(id, prompt)), now)]


def told(actions: list[AnyAction]) -> list[tuple[RequestId, Rejection]]:
    return [(action.request, action.rejection) for action in actions if isinstance(action, Reply)]


# -- routing


def test_the_least_loaded_replica_is_the_one_with_the_fewest_tokens_and_ties_go_to_the_lowest_id() -> None:
    r = router(LeastLoaded(output_tokens=100), replicas=3)
    actions = arrive(r, 0, prompt=500) + arrive(r, 1, prompt=10) + arrive(r, 2, prompt=200) + arrive(r, 3, 4, prompt=100)
    assert [action.to for action in actions if isinstance(action, Send)] == [0, 1, 2, 1, 2]


def test_round_robin_takes_each_in_turn_whatever_their_load() -> None:
    r = router(RoundRobin(), replicas=3)
    actions = arrive(r, 0, prompt=900) + arrive(r, 1, 2, 3, 4, 5, 6, prompt=10)
    assert [action.to for action in actions if isinstance(action, Send)] == [0, 1, 2, 0, 1, 2, 0]


def test_pull_binds_a_request_when_a_replica_has_a_seat() -> None:
    r = router(Pull(max_outstanding=1), replicas=2)
    assert arrive(r, 0, 1, 2, 3) == [sent(0, 0), sent(1, 1)]
    assert r.handle(Progressed(1, first=(1,), finished=(1,)), 5) == [sent(1, 2)]
    assert r.handle(Progressed(0, first=(0,), finished=(0,)), 6) == [sent(0, 3)]
    assert (r.num_queued, r.num_outstanding) == (0, 2)


def test_a_replica_with_many_requests_without_a_token_takes_no_more_until_one_has_it() -> None:
    """field issue 47: the waiting room is bounded because what waits at the replicas is, too."""
    r = router(LeastLoaded(max_waiting=2), replicas=1, max_requests=1)
    assert arrive(r, 0, 1, 2) == [sent(0, 0), sent(0, 1)]
    assert told(arrive(r, 3)) == [(3, Rejection.QUEUE_FULL)]
    assert r.handle(Progressed(0, first=(0,)), 1) == [sent(0, 2)]


class Longest(Struct, frozen=True):
    """A user's own policy that ranks: most tokens first."""

    def rank(self, replica: ReplicaView) -> float:
        return -float(replica.num_tokens)


class BySession(Struct, frozen=True):
    """A user's own policy that chooses, and lets odd requests wait."""

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        return None if request.id % 2 else view.replicas[request.session % len(view.replicas)].replica


class Wild(Struct, frozen=True):
    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        return 99


class Undefined(Struct, frozen=True):
    """Divides nothing by nothing for a replica that had nothing."""

    def rank(self, replica: ReplicaView) -> float:
        return float(replica.num_tokens) or float("nan")


def test_a_users_policy_may_rank() -> None:
    r = router(Longest(), replicas=3)
    assert arrive(r, 0, 1, 2) == [sent(0, 0), sent(0, 1), sent(0, 2)]


def test_a_users_policy_may_choose_and_may_let_a_request_wait() -> None:
    r = router(BySession(), replicas=2)
    assert arrive(r, 0) == [sent(0, 0)]
    assert arrive(r, 1, 2) == []  # first come, first served: 2 does not overtake
    assert r.num_queued == 2


def test_a_policy_that_chooses_a_replica_that_is_not_there_is_told_which_are() -> None:
    r = router(Wild(), replicas=2)
    with pytest.raises(
        ConfigError, match="route policy Wild chose replica 99; it may choose one of 0, 1, or None to keep waiting"
    ):
        arrive(r, 0)
    r.handle(up(4, num_blocks=200), 0)
    with pytest.raises(ConfigError, match="it may choose one of 4, or None"):
        arrive(r, 1, prompt=2000)


def test_a_rank_that_is_not_a_number_is_told_before_the_order_is_lost() -> None:
    r = router(Undefined(), replicas=2)
    with pytest.raises(ConfigError, match=r"Undefined\.rank of replica [01] is nan; it may be a number, or None to get nothing"):
        arrive(r, 0)


# -- admission


def test_a_request_that_no_kv_pool_can_hold_is_refused_at_the_door() -> None:
    r = router(replicas=1)
    assert arrive(r, 0, prompt=1550) == [sent(0, 0, prompt=1550)]
    message = "request 1: 1551 prompt tokens and up to 50 output tokens do not fit into a KV cache of 1600 tokens"
    assert arrive(r, 1, prompt=1551) == [Reply(1, Rejection.TOO_LARGE, message, 0.0)]
    assert not Rejection.TOO_LARGE.retryable


def test_a_request_that_may_grow_beyond_the_longest_that_may_be_is_refused_whatever_room_there_is() -> None:
    r = Router(LeastLoaded(), 100, 10**6, 2, max_model_len=150)
    r.handle(up(0), 0)
    assert len(arrive(r, 0, prompt=100)) == 1
    message = "request 1: 151 tokens, prompt and output together, are more than the 150 that may be"
    assert arrive(r, 1, prompt=101) == [Reply(1, Rejection.TOO_LARGE, message, 0.0)]


def test_before_the_first_replica_is_up_a_request_is_queued_and_judged_later() -> None:
    """field issues 43 and 45: the router starts with no workers, and serves when one comes."""
    r = router()
    assert arrive(r, 0) + arrive(r, 1, prompt=5000) + arrive(r, 2) == []
    actions = r.handle(up(0), SECOND)
    assert told(actions) == [(1, Rejection.TOO_LARGE)]
    assert actions[1:] == [sent(0, 0), sent(0, 2)]


def test_a_request_that_only_a_larger_replica_holds_goes_there_and_may_come_back_later_when_that_one_is_down() -> None:
    r = router(replicas=1)
    r.handle(up(1, num_blocks=200), 0)
    arrive(r, 0, 1)
    assert arrive(r, 2, 3, prompt=2000) == [sent(1, 2, prompt=2000), sent(1, 3, prompt=2000)]
    actions = r.handle(ReplicaDown(1, lost=True), 0)
    assert told(actions) == [(2, Rejection.NO_CAPACITY), (3, Rejection.NO_CAPACITY)]
    assert actions[2:] == [sent(0, 1)]
    assert told(arrive(r, 4, prompt=2000)) == [(4, Rejection.NO_CAPACITY)]


def test_the_queue_is_bounded_in_requests() -> None:
    """field issue 47."""
    r = router(max_requests=2)
    assert arrive(r, 0, 1) == []
    message = "request 2: 2 requests with 200 prompt tokens are waiting already"
    assert arrive(r, 2) == [Reply(2, Rejection.QUEUE_FULL, message, 5.0)]


def test_the_queue_is_bounded_in_prompt_tokens() -> None:
    r = router(max_tokens=250)
    assert arrive(r, 0, 1) == []
    assert told(arrive(r, 2)) == [(2, Rejection.QUEUE_FULL)]
    assert arrive(r, 3, prompt=50) == []
    r.handle(Cancelled(0), 0)
    assert arrive(r, 4) == []


def test_a_full_queue_says_when_to_come_back_from_how_fast_requests_finish() -> None:
    r = router(Pull(max_outstanding=1), replicas=1, max_requests=8)
    arrive(r, *range(9))
    for second in range(8):  # one a second, a new one in its place
        r.handle(Progressed(0, (second,), (second,)), second * SECOND)
        arrive(r, 9 + second, now=second * SECOND)
    (reply,) = arrive(r, 17, now=7 * SECOND)
    assert isinstance(reply, Reply)
    assert reply.retry_after_s == 7.0  # 8 wait, 8 finished in 7 s
    (reply,) = arrive(r, 18, now=1000 * SECOND)
    assert isinstance(reply, Reply)
    assert reply.retry_after_s == 5.0  # nothing has finished of late: unknown


def test_after_an_overload_the_next_request_is_served_at_once() -> None:
    """field issue 38: rejections leave no trace."""
    r = router(Pull(max_outstanding=1), replicas=1, max_requests=1)
    arrive(r, 0, 1)
    for id in range(2, 60):
        assert told(arrive(r, id)) == [(id, Rejection.QUEUE_FULL)]
    r.handle(Progressed(0, (0,), (0,)), 1)
    assert r.handle(Progressed(0, (1,), (1,)), 2) == []
    assert arrive(r, 60) == [sent(0, 60)]


def test_more_replicas_do_not_dilute_the_queue_and_a_withdrawn_one_loses_nothing() -> None:
    """field issues 14 and 15: what waits is bound to no replica: a new one gets it at once, a withdrawn one cannot lose it."""
    r = router(Pull(max_outstanding=1), replicas=1)
    arrive(r, 0, 1, 2, 3)
    assert r.handle(up(1), 5) == [sent(1, 1)]
    assert r.handle(ReplicaDown(0, lost=False), 6) == []
    assert r.handle(Progressed(0, (0,), (0,)), 7) == [Send(CONTROLLER, Emptied(0))]
    assert r.handle(Progressed(1, (1,), (1,)), 8) == [sent(1, 2)]
    assert r.num_queued == 1


# -- cancellation


def test_cancelling_a_queued_request_tells_nobody() -> None:
    r = router()
    arrive(r, 0, 1)
    assert r.handle(Cancelled(0), 1) == []
    assert r.handle(up(0), 2) == [sent(0, 1)]


def test_cancelling_a_running_request_tells_its_replica_once_and_frees_its_place_when_it_lets_go() -> None:
    r = router(Pull(max_outstanding=1), replicas=1)
    arrive(r, 0, 1)
    assert r.handle(Cancelled(0), 1) == [Send(0, Cancelled(0))]
    assert r.handle(Cancelled(0), 2) == []
    assert r.handle(Progressed(0, finished=(0,)), 3) == [sent(0, 1)]
    assert r.handle(Cancelled(0), 4) == []


def test_a_cancelled_request_is_not_retried_when_its_replica_dies() -> None:
    r = router(replicas=2)
    arrive(r, 0)
    r.handle(Cancelled(0), 1)
    assert r.handle(ReplicaDown(0, lost=True), 2) == []
    assert (r.num_queued, r.num_outstanding) == (0, 0)


# -- replicas die


def test_the_requests_of_a_lost_replica_go_elsewhere_in_order_and_before_all_that_wait() -> None:
    r = router(Pull(max_outstanding=2), replicas=2)
    arrive(r, 0, 1, 2, 3, 4, 5)
    r.handle(Progressed(0, first=(0, 2)), 1)
    assert r.handle(ReplicaDown(0, lost=True), 2) == []
    assert r.handle(Progressed(1, (1,), (1,)), 3) == [sent(1, 0)]
    assert r.handle(Progressed(1, (3,), (3,)), 4) == [sent(1, 2)]
    assert r.handle(Progressed(1, (0, 2), (0, 2)), 5) == [sent(1, 4), sent(1, 5)]


def test_a_retried_request_avoids_the_replicas_that_lost_it_while_another_is_up() -> None:
    """field issue 41: affinity must not send all attempts to the same dead worker."""
    r = router(Pull(max_outstanding=5), replicas=2)
    assert arrive(r, 0) == [sent(0, 0)]
    assert r.handle(ReplicaDown(0, lost=True), 1) == [sent(1, 0)]
    r.handle(up(0), 2)
    r.handle(up(2), 2)
    assert r.handle(ReplicaDown(1, lost=True), 3) == [sent(2, 0)]  # though replica 0 is as empty and comes first


def test_with_no_other_replica_a_retried_request_waits_for_the_lost_one_to_come_back() -> None:
    r = router(replicas=1)
    arrive(r, 0)
    assert r.handle(ReplicaDown(0, lost=True), 1) == []
    assert r.handle(up(0), 2) == [sent(0, 0)]


def test_a_request_that_loses_more_replicas_than_it_may_is_given_up() -> None:
    r = router(replicas=3, max_retries=1)
    arrive(r, 0)
    assert r.handle(ReplicaDown(0, lost=True), 1) == [sent(1, 0)]
    actions = r.handle(ReplicaDown(1, lost=True), 2)
    assert actions == [Reply(0, Rejection.LOST, "request 0: lost its replica 2 times", 1.0)]
    assert (r.num_queued, r.num_outstanding) == (0, 0)


# -- shutting down


def test_a_draining_service_finishes_what_it_has_and_takes_nothing_new() -> None:
    r = router(Pull(max_outstanding=1), replicas=1)
    arrive(r, 0, 1, 2)
    assert r.handle(DrainWanted(), 1) == []
    assert told(arrive(r, 3)) == [(3, Rejection.DRAINING)]
    assert r.handle(ReplicaDown(0, lost=False), 1) == []  # still needed for requests 1 and 2
    assert r.handle(Progressed(0, (0,), (0,)), 2) == [sent(0, 1)]
    assert r.handle(Progressed(0, (1,), (1,)), 3) == [sent(0, 2)]
    assert r.handle(Progressed(0, (2,), (2,)), 4) == [Send(CONTROLLER, Emptied(0))]


def test_a_draining_service_without_replicas_sends_its_queue_away() -> None:
    r = router()
    arrive(r, 0, 1)
    assert told(r.handle(DrainWanted(), 1)) == [(0, Rejection.DRAINING), (1, Rejection.DRAINING)]


def test_a_withdrawn_replica_is_revived_with_what_it_has() -> None:
    r = router(Pull(max_outstanding=1), replicas=1)
    arrive(r, 0)
    assert r.handle(ReplicaDown(0, lost=False), 1) == []
    assert arrive(r, 1) == []
    assert r.handle(up(0), 2) == []
    assert r.handle(Progressed(0, (0,), (0,)), 3) == [sent(0, 1)]


# -- what cannot happen


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Progressed(0, finished=(9,)), "replica 0 says 'finished' of request 9, which is unknown"),
        (Progressed(1, first=(0,)), "replica 1 says 'first token' of request 0, which is waiting elsewhere"),
        (Progressed(5), "replica 5 reports .*, but is not up"),
        (Arrived(request(0)), "request 0 arrived twice: it is waiting"),
        (up(0), "replica 0 came up while it was up"),
        (StepsDone(1, 1), "the router got StepsDone, which is not for it"),
    ],
)
def test_what_cannot_happen_is_refused(event: Arrived | Progressed | ReplicaUp | StepsDone, message: str) -> None:
    r = router(replicas=2)
    arrive(r, 0)
    with pytest.raises(IllegalTransition, match=message):
        r.handle(event, 1)
    assert r.handle(Woke(), 1) == []


def test_a_token_after_the_first_is_not_a_first_one() -> None:
    r = router(replicas=1)
    arrive(r, 0)
    r.handle(Progressed(0, first=(0,)), 1)
    with pytest.raises(IllegalTransition, match="replica 0 says 'first token' of request 0, which is running"):
        r.handle(Progressed(0, first=(0,)), 2)


# -- whatever happens


class Fleet:
    """Plays replicas and clients at random, and knows where every request is."""

    def __init__(self, policy: RoutePolicy) -> None:
        self.router = router(policy, max_requests=6)
        self.policy = policy
        self.up: set[ReplicaId] = set()
        self.draining: set[ReplicaId] = set()
        self.at: dict[RequestId, ReplicaId] = {}
        self.started: set[RequestId] = set()
        self.lost_by: dict[RequestId, set[ReplicaId]] = {}
        self.ended: Counter[RequestId] = Counter()
        self.arrived = 0
        self.cancelled: set[RequestId] = set()
        self.emptied: list[ReplicaId] = []

    def tell(self, event: Arrived | Progressed | Cancelled | ReplicaUp | ReplicaDown | DrainWanted, now: int) -> None:
        for action in self.router.handle(event, now):
            match action:
                case Send(to, Submitted(request)):
                    lost_by = self.lost_by.get(request.id, set())
                    assert to in self.up
                    assert to not in lost_by or self.up <= lost_by
                    assert request.id not in self.at
                    assert request.id not in self.ended
                    self.at[request.id] = to
                case Send(to, Cancelled(request=id)):
                    assert self.at[id] == to
                case Send(to, Emptied(replica)):
                    assert to == CONTROLLER
                    assert replica not in self.at.values()
                    self.draining.remove(replica)
                case Reply(request=id):
                    self.ended[id] += 1

    def play(self, move: str, number: int, now: int) -> None:
        replica = number % 3
        mine = sorted(id for id, at in self.at.items() if at == replica)
        id = number % (self.arrived + 1)
        if move == "arrive":
            self.arrived += 1
            one = request(self.arrived, prompt=1 + number)
            hashes = tuple(range(1000 * (number % 4), 1000 * (number % 4) + number // 8))
            self.tell(Arrived(structs.replace(one, session=number % 5, block_hashes=hashes)), now)
        elif move == "up" and replica not in self.up | self.draining:
            self.up.add(replica)
            self.tell(up(replica), now)
        elif move == "withdraw" and replica in self.up:
            self.up.remove(replica)
            self.draining.add(replica)
            self.tell(ReplicaDown(replica, lost=False), now)
        elif move == "lose" and replica in self.up | self.draining:
            self.up.discard(replica)
            self.draining.discard(replica)
            for gone in mine:
                del self.at[gone]
                self.started.discard(gone)
                self.lost_by.setdefault(gone, set()).add(replica)
                if gone in self.cancelled:
                    self.ended[gone] += 1
            self.tell(ReplicaDown(replica, lost=True), now)
        elif move == "first" and any(mine):
            first = tuple(id for id in mine if id not in self.started)[:2]
            self.started.update(first)
            self.tell(Progressed(replica, first=first), now)
        elif move == "preempt" and mine:
            self.tell(Progressed(replica, preempted=(mine[-1],)), now)
        elif move == "finish" and mine:
            done = mine[: 1 + number % 2]
            first = tuple(id for id in done if id not in self.started)
            for id in done:
                del self.at[id]
                self.ended[id] += 1
            self.tell(Progressed(replica, first=first, finished=tuple(done)), now)
        elif move == "cancel" and 0 < id <= self.arrived and id not in self.ended and id not in self.cancelled:
            self.cancelled.add(id)
            if id not in self.at:
                self.ended[id] += 1
            self.tell(Cancelled(id), now)

    def check(self) -> None:
        assert max(self.ended.values(), default=1) == 1
        unfinished = [id for id in range(1, self.arrived + 1) if id not in self.ended]
        assert len(unfinished) == self.router.num_queued + self.router.num_outstanding
        assert len(self.at) == self.router.num_outstanding
        assert self.router.num_open == len(self.up)
        for backend in self.router._backends.values():
            at = [id for id, replica in self.at.items() if replica == backend.replica]
            running = [id for id in at if id in self.started]
            assert (backend.num_waiting, backend.num_running) == (len(at) - len(running), len(running))
            assert 0 <= backend.num_preempted <= backend.num_running
            if not at:
                assert backend.num_tokens == 0
        index = self.router._index if isinstance(self.router._index, Ranked) else self.router._index._ranked
        if index is not None:
            for backend in index.replicas:
                rank = index._rank(backend)
                standing = None if rank is None else (rank, backend.replica, backend)
                assert backend in index._changed or backend.standing == standing
            assert index._order == sorted(backend.standing for backend in index.replicas if backend.standing is not None)
        if self.router.num_queued and self.up and not isinstance(self.policy, Pull | RoundRobin | LeastKv):
            raise AssertionError("a request waits though replicas are up")

    def finish_all(self, now: int) -> None:
        """Whatever state the fleet is in, once a replica is up and all do their work everything ends."""
        self.play("up", 0, now)
        self.play("up", 1, now)
        for _ in range(1000):
            if not (self.at or self.router.num_queued):
                break
            for replica in range(3):
                self.play("finish", replica, now)
                self.play("up", replica, now)
        self.check()
        assert sorted(self.ended) == list(range(1, self.arrived + 1))


MOVES = st.sampled_from(
    ["arrive", "arrive", "arrive", "up", "withdraw", "lose", "first", "preempt", "finish", "finish", "cancel"]
)

POLICIES = [
    LeastLoaded(), LeastLoaded(output_tokens=0), LeastKv(), LeastOutstanding(), Pull(max_outstanding=2), RoundRobin(), Random(),
    PowerOfTwo(), Session(max_excess=40), PrefixAffinity(max_excess=40, prefix_apart=16), Longest(),
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    moves=st.lists(st.tuples(MOVES, st.integers(0, 40)), max_size=60),
)
def test_every_request_ends_exactly_once_and_load_returns_to_zero(policy: Route, moves: list[tuple[str, int]]) -> None:
    fleet = Fleet(policy)
    for now, (move, number) in enumerate(moves):
        fleet.play(move, number, now * SECOND)
        fleet.check()
    fleet.finish_all(len(moves) * SECOND)


@settings(max_examples=100, deadline=None)
@given(loads=st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=200))
def test_the_index_picks_what_a_scan_would(loads: list[tuple[int, bool]]) -> None:
    policy = LeastLoaded(output_tokens=7)
    r = router(policy, replicas=5)
    at: list[tuple[RequestId, ReplicaId]] = []
    for id, (prompt, finish) in enumerate(loads):
        expected = min(r._index.replicas, key=lambda replica: (policy.rank(replica), replica.replica)).replica
        assert arrive(r, id, prompt=prompt) == [sent(expected, id, prompt=prompt)]
        at.append((id, expected))
        if finish:
            done, replica = at.pop(prompt % len(at))
            assert r.handle(Progressed(replica, (done,), (done,)), id) == []
