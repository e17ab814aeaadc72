"""Scale policies are arithmetic on a view: hand-made fleets with the numbers that should come out."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from squall.core.fleet_view import Capacity, Wanted
from squall.core.types import SECOND, Nanos, Role
from squall.policies.scale import Blitz, Concurrency, Fixed, Predictive, Scale, Schedule, Step, Ttft, Utilisation
from squall.policies.scale.equations import Demand

CAPACITY = Capacity(
    prefill_tokens_per_s=12_000,
    decode_tokens_per_s=2_000,
    transfer_tokens_per_s=60_000,
    num_blocks=30_000,
    block_size=64,
    load_s=1.0,
)


class Seen(Struct):
    """A role as a policy sees it."""

    role: Role = Role.BOTH
    num_ready: int = 1
    num_coming: int = 0
    minimum: int = 0
    maximum: int = 100
    initial: int = 2
    num_draining: int = 0
    num_idle: int = 0
    next_ready_s: float | None = None
    num_queued: int = 0
    num_queued_tokens: int = 0
    oldest_queued_at: Nanos | None = None
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_running: int = 0
    num_promised_tokens: int = 0
    num_blocks: int = 30_000
    block_size: int = 64
    arrived_per_s: float | None = None
    arrived_tokens_per_s: float | None = None
    past: Callable[[float], float | None] = lambda ago_s: None
    unfinished: Callable[[float], float | None] = lambda window_s: None

    def past_tokens_per_s(self, ago_s: float, /) -> float | None:
        return self.past(ago_s)

    def mean_unfinished(self, window_s: float, /) -> float | None:
        return self.unfinished(window_s)


class View(Struct):
    roles: dict[Role, Seen]
    now: Nanos = 100 * SECOND
    began_at: Nanos = 0
    capacity: Capacity | None = field(default_factory=lambda: CAPACITY)


def colocated(**seen: Any) -> View:
    return View({Role.BOTH: Seen(**seen)})


def disaggregated(prefill: dict[str, Any], decode: dict[str, Any]) -> View:
    return View({Role.PREFILL: Seen(Role.PREFILL, **prefill), Role.DECODE: Seen(Role.DECODE, **decode)})


def both(wanted: Wanted) -> tuple[int, int]:
    return wanted.counts[Role.PREFILL], wanted.counts[Role.DECODE]


def one(wanted: Wanted) -> int:
    return wanted.counts[Role.BOTH]


# -- blitz

PUBLISHED = Blitz(
    prefill_lower_s=0.5,
    prefill_upper_s=0.8,
    decode_lower=0.75,
    decode_upper=0.95,
    migration_lower_s=0.2,
    migration_upper_s=0.4,
    original=True,
)


@pytest.mark.parametrize(
    ("now", "work", "prefill_target", "decode_target", "change"),
    [
        ((1, 1), Demand(40_000, 5_000, 12_800), (5, 7), (1, 2), (5, 0)),
        ((4, 2), Demand(0, 5_000, 12_800), (1, 1), (1, 1), (-1, -1)),
        ((1, 1), Demand(9_000, 29_000, 128_000), (6, 6), (6, 11), (5, 8)),
    ],
    ids=["queue", "idle", "kv"],
)
def test_the_published_equations(
    now: tuple[int, int], work: Demand, prefill_target: tuple[int, int], decode_target: tuple[int, int], change: tuple[int, int]
) -> None:
    prefill, decode = PUBLISHED.targets(work, CAPACITY, now[1])
    assert (prefill.fewest, prefill.most) == prefill_target
    assert (decode.fewest, decode.most) == decode_target
    assert (prefill.step(now[0]), decode.step(now[1])) == change


def test_the_published_planner_through_the_view() -> None:
    # 12,800 tokens promised at prefill replicas are 200 blocks; the other 4,800 of 5,000 are at decode replicas
    view = disaggregated(
        {"num_queued_tokens": 40_000, "num_promised_tokens": 12_800}, {"num_promised_tokens": 4_800 * 64, "num_coming": 0}
    )
    wanted = PUBLISHED(view)
    assert both(wanted) == (6, 1)
    assert wanted.why == {
        Role.PREFILL: "prompts that wait: 40000 tokens, 5 to 7 wanted",
        Role.DECODE: "KV to transfer: 12800 tokens, 1 to 2 wanted",
    }


def _walk(policy: Blitz, tokens: int, steps: int = 200) -> list[int]:
    """Decode replicas, decision by decision, while `tokens` have to be transferred, whatever their number."""
    walked = [1]
    for _ in range(steps):
        _, target = policy.targets(Demand(0, 100, tokens), CAPACITY, walked[-1])
        walked.append(walked[-1] + target.step(walked[-1]))
    return walked


def test_the_published_kv_term_is_no_fixed_point_and_the_corrected_one_is() -> None:
    def target(policy: Blitz, decodes: int) -> tuple[int, int]:
        _, wanted = policy.targets(Demand(0, 100, 768_000), CAPACITY, decodes)
        return wanted.fewest, wanted.most

    assert [target(PUBLISHED, decodes) for decodes in (1, 48, 1)] == [(32, 64), (1, 2), (32, 64)]
    assert _walk(PUBLISHED, 768_000)[:5] == [1, 48, 47, 46, 45]  # one fewer with every decision ...
    assert _walk(PUBLISHED, 768_000)[-1] == 8  # ... down to a fourth of what 0.4 s of transfer need
    corrected = msgspec.structs.replace(PUBLISHED, original=False)
    assert {target(corrected, decodes) for decodes in range(1, 100)} == {(32, 64)}
    assert _walk(corrected, 768_000) == [1] + [48] * 200


def test_between_narrow_thresholds_the_published_planner_swings_for_ever() -> None:
    narrow = msgspec.structs.replace(PUBLISHED, migration_lower_s=0.39, migration_upper_s=0.4)
    assert _walk(narrow, 624_000)[-6:] == [5, 6, 5, 6, 5, 6]  # 26 replicas would need 0.4 s
    assert _walk(msgspec.structs.replace(narrow, original=False), 624_000)[-6:] == [27] * 6


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**7), st.integers(1, 60), st.integers(1, 60))
def test_the_corrected_equations_come_to_rest(prompts: int, blocks: int, leaving: int, prefills: int, decodes: int) -> None:
    policy, work = Blitz(), Demand(prompts, blocks, leaving)
    for _ in range(2000):
        prefill, decode = policy.targets(work, CAPACITY, decodes)
        before = prefills, decodes
        prefills, decodes = prefills + prefill.step(prefills), decodes + decode.step(decodes)
        if (prefills, decodes) == before:
            return
    pytest.fail("still changing")


def test_a_colocated_fleet_follows_prefill_rate_and_memory() -> None:
    assert one(Blitz()(colocated(num_queued_tokens=40_000))) == 6
    assert one(Blitz()(colocated(num_queued_tokens=20_000, num_waiting_tokens=20_000))) == 6
    assert one(Blitz()(colocated(num_promised_tokens=64 * 60_000))) == 3
    assert one(Blitz()(colocated(num_ready=4, arrived_tokens_per_s=0.0))) == 1  # nothing to do: all but one, at once
    assert one(PUBLISHED(colocated(num_ready=4))) == 3  # one fewer, once


def test_the_corrected_planner_keeps_what_arrives_busy_and_the_published_one_does_not() -> None:
    def view(arriving: float | None) -> View:
        return disaggregated({"num_ready": 9, "arrived_tokens_per_s": arriving}, {"num_ready": 4})

    assert [both(Blitz()(view(rate))) for rate in (0.0, 12_000.0, 12_001.0, 60_000.0)] == [(1, 1), (1, 1), (2, 1), (5, 1)]
    assert both(Blitz()(view(10**7))) == (9, 1)  # what is slow to see is no reason to grow
    assert both(Blitz()(view(None))) == (9, 1)  # nobody knows is not none
    asks = "prompts that wait: 0 tokens, 0 to 0 wanted; 60000 tokens arrive a second"
    assert Blitz()(view(60_000.0)).why_of(Role.PREFILL) == asks
    assert both(PUBLISHED(view(60_000.0))) == (8, 3)


@given(st.integers(1, 40), st.floats(0.05, 30.0))
def test_the_corrected_planner_does_not_flap_while_arrivals_and_what_waits_are_steady(ready: int, replicas: float) -> None:
    """A fleet that keeps up has a tenth of a second of prompts waiting, whatever its size, and rests where it can serve them."""
    arriving = replicas * CAPACITY.prefill_tokens_per_s
    seen = [ready]
    for _ in range(4):
        view = disaggregated(
            {"num_ready": seen[-1], "num_waiting_tokens": round(arriving / 10), "arrived_tokens_per_s": arriving},
            {"num_ready": 1},
        )
        seen.append(both(Blitz()(view))[0])
    assert seen[2:] == [seen[1]] * 3
    assert seen[1] >= min(ready, math.ceil(replicas))


def test_replicas_on_their_way_count_and_those_that_leave_do_not() -> None:
    assert one(Blitz()(colocated(num_queued_tokens=40_000, num_coming=4))) == 5
    assert one(Blitz()(colocated(num_queued_tokens=40_000, num_draining=4, num_idle=3))) == 6


def test_without_a_capacity_nothing_is_done() -> None:
    for policy in (Blitz(), Ttft(), Utilisation(), Predictive()):
        view = colocated(num_ready=3, num_coming=1, num_queued_tokens=10**6)
        view.capacity = None
        assert one(policy(view)) == 4


# -- ttft


def test_ttft_stays_while_prompts_are_in_time() -> None:
    policy = Ttft(ttft_s=1.0)
    assert one(policy(colocated(num_ready=2, num_waiting=4, num_waiting_tokens=8_000, arrived_tokens_per_s=10_000))) == 2


def test_ttft_counts_on_the_rest_of_a_load() -> None:
    queue = {"num_ready": 1, "num_queued": 100, "num_queued_tokens": 100_000, "arrived_tokens_per_s": 12_000.0}
    # service is 1/12 s, so 0.7 - 0.083 s are left for waiting; a load takes 1 s, in which one replica keeps up with arrivals
    assert one(Ttft()(colocated(**queue))) == 14  # ceil(100,000 / 12,000 / 0.6167)
    # with one that has a second to go, the same; with one that is ready at once, nothing was computed in the meantime either
    assert one(Ttft()(colocated(**queue, num_coming=1, next_ready_s=0.0))) == 14
    falling = {**queue, "arrived_tokens_per_s": 0.0}
    assert one(Ttft()(colocated(**falling, num_coming=1, next_ready_s=4.0))) == 8  # 48,000 are done by then
    assert one(Ttft()(colocated(**falling, num_coming=1, next_ready_s=1.0))) == 12


def test_ttft_sees_a_prompt_that_has_waited_too_long_whatever_the_prediction() -> None:
    late = colocated(num_ready=3, num_queued=1, num_queued_tokens=10, oldest_queued_at=98 * SECOND, arrived_tokens_per_s=10.0)
    wanted = Ttft(ttft_s=1.0)(late)
    assert one(wanted) == 4
    assert wanted.why == "a prompt has waited 2.00 s > 0.70 s"


def test_ttft_takes_steady_arrivals_for_good_and_shrinks_when_they_fade() -> None:
    assert one(Ttft()(colocated(num_ready=2, arrived_tokens_per_s=96_000))) == 10  # 8 replicas' worth, each loaded to 80 %
    assert one(Ttft()(colocated(num_ready=20, arrived_tokens_per_s=9_600))) == 3  # 1, with room of 0.7 / 0.3
    assert one(Ttft()(colocated(num_ready=20, arrived_tokens_per_s=0))) == 0


def test_unknown_arrivals_are_not_none_at_all() -> None:
    assert one(Ttft()(colocated(num_ready=20))) == 20
    assert one(Utilisation()(colocated(num_ready=20))) == 20
    assert one(Predictive()(colocated(num_ready=20))) == 20
    assert one(Concurrency()(colocated(num_ready=20))) == 20


def test_ttft_serves_the_first_prompt_of_an_empty_fleet() -> None:
    assert one(Ttft()(colocated(num_ready=0, num_queued=1, num_queued_tokens=100, arrived_tokens_per_s=10))) >= 1
    assert one(Ttft()(colocated(num_ready=0, arrived_tokens_per_s=0.0))) == 0


def test_ttft_gives_decode_replicas_what_kv_is_promised_anywhere() -> None:
    pool = 30_000 * 64
    view = disaggregated(
        {"num_ready": 2, "arrived_tokens_per_s": 10_000, "num_promised_tokens": pool},
        {"num_ready": 2, "num_promised_tokens": pool},
    )
    assert both(Ttft()(view)) == (2, 3)  # 2 pools / 0.9
    view.roles[Role.DECODE].num_ready = 9
    assert both(Ttft()(view)) == (2, 4)  # 2 pools / 0.6


@given(st.floats(0, 10**6), st.integers(0, 50))
def test_ttft_does_not_flap_under_constant_load(arriving: float, ready: int) -> None:
    policy, view = Ttft(), colocated(num_ready=ready, arrived_tokens_per_s=arriving)
    first = one(policy(view))
    for _ in range(5):
        view.roles[Role.BOTH].num_ready = one(policy(view))
    assert view.roles[Role.BOTH].num_ready == first


# -- concurrency


def _means(stable: float | None, short: float | None) -> Callable[[float], float | None]:
    return {60.0: stable, 6.0: short}.get


def test_concurrency_aims_at_a_share_of_the_target() -> None:
    policy = Concurrency(target=10, utilisation=0.7)
    assert one(policy(colocated(num_ready=4, unfinished=_means(21.0, 21.0)))) == 3
    assert one(policy(colocated(num_ready=4, unfinished=_means(21.1, 0.0)))) == 4
    assert one(policy(colocated(num_ready=4, unfinished=_means(0.0, 0.0)))) == 0


def test_concurrency_panics_when_the_short_window_asks_for_twice_the_fleet() -> None:
    policy = Concurrency(target=10, utilisation=0.7)
    wanted = policy(colocated(num_ready=4, unfinished=_means(21.0, 56.0)))
    assert one(wanted) == 8
    assert wanted.why_of(Role.BOTH) == "panic: 56.0 unfinished over 6 s"
    assert one(policy(colocated(num_ready=4, unfinished=_means(21.0, 48.9)))) == 3  # 7 is less than twice 4
    assert one(policy(colocated(num_ready=4, num_coming=9, unfinished=_means(21.0, 56.0)))) == 13  # no shrinking in a panic


def test_concurrency_without_a_whole_window_may_grow_only() -> None:
    policy = Concurrency(target=10, utilisation=0.7)
    assert one(policy(colocated(num_ready=2, num_queued=20, num_waiting=4, num_running=4))) == 4
    assert one(policy(colocated(num_ready=9, num_queued=20))) == 9


def test_concurrency_has_targets_for_both_roles() -> None:
    policy = Concurrency(target=10, prefill_target=2, utilisation=1.0)
    view = disaggregated({"unfinished": _means(6.0, 6.0), "num_ready": 2}, {"unfinished": _means(6.0, 6.0), "num_ready": 1})
    assert both(policy(view)) == (3, 1)


# -- utilisation


def test_utilisation_is_kept_at_its_target_within_the_tolerance() -> None:
    policy = Utilisation(target_compute=0.5, tolerance=0.1)
    assert one(policy(colocated(num_ready=4, arrived_tokens_per_s=24_000 * 1.09))) == 4
    assert one(policy(colocated(num_ready=4, arrived_tokens_per_s=24_000 * 1.12))) == 5
    assert one(policy(colocated(num_ready=4, arrived_tokens_per_s=12_000))) == 2
    assert one(policy(colocated(num_ready=0, arrived_tokens_per_s=12_000))) == 2


def test_utilisation_of_either_kind_makes_a_colocated_fleet_grow() -> None:
    pool = 30_000 * 64
    wanted = Utilisation(target_kv=0.8)(colocated(num_ready=2, arrived_tokens_per_s=100, num_promised_tokens=4 * pool))
    assert one(wanted) == 5
    assert wanted.why_of(Role.BOTH) == "KV 200%, target 80%"
    view = disaggregated({"num_ready": 1, "arrived_tokens_per_s": 84_000}, {"num_ready": 1, "num_promised_tokens": 2 * pool})
    assert both(Utilisation()(view)) == (10, 3)


# -- predictive


def _daily(rates: dict[float, float]) -> Callable[[float], float | None]:
    return rates.get


def test_predictive_starts_replicas_before_yesterdays_rise() -> None:
    policy = Predictive(season_s=1000, window_s=10, ahead_s=50, max_load=0.5)
    rising = _daily({1000.0: 6_000.0, 950.0: 60_000.0})
    assert one(policy(colocated(arrived_tokens_per_s=6_000, past=rising))) == 10
    assert one(policy(colocated(arrived_tokens_per_s=12_000, past=rising))) == 20  # today is twice as busy
    assert one(policy(colocated(arrived_tokens_per_s=60_000, past=rising))) == 30  # but no more than three times is believed
    falling = _daily({1000.0: 60_000.0, 950.0: 6_000.0})
    assert one(policy(colocated(arrived_tokens_per_s=60_000, past=falling))) == 10  # what arrives now is served now


def test_predictive_averages_seasons_and_follows_the_present_without_any() -> None:
    policy = Predictive(season_s=1000, window_s=10, ahead_s=50, max_load=0.5, num_seasons=2)
    two = _daily({1000.0: 6_000.0, 950.0: 60_000.0, 2000.0: 6_000.0, 1950.0: 12_000.0})
    assert one(policy(colocated(arrived_tokens_per_s=6_000, past=two))) == 6
    assert one(policy(colocated(arrived_tokens_per_s=6_000))) == 1
    assert one(policy(colocated(arrived_tokens_per_s=6_000, num_queued_tokens=120_000))) == 2
    assert policy.memory_s == 2000


def test_predictive_lets_decode_replicas_grow_alike() -> None:
    policy = Predictive(season_s=1000, window_s=10, ahead_s=50, max_load=0.5, max_kv=0.5)
    rising = _daily({1000.0: 6_000.0, 950.0: 12_000.0})
    view = disaggregated({"arrived_tokens_per_s": 6_000, "past": rising}, {"num_promised_tokens": 30_000 * 64})
    assert both(policy(view)) == (2, 4)


# -- by the clock


def test_a_fixed_fleet_is_as_configured() -> None:
    assert both(Fixed()(disaggregated({"initial": 3}, {"initial": 5}))) == (3, 5)


def test_a_schedule_holds_its_last_step_and_begins_again() -> None:
    policy = Schedule(steps=(Step(at_s=10, replicas=2), Step(at_s=60, replicas=8)), period_s=100)

    def at(second: int) -> int:
        return one(policy(View({Role.BOTH: Seen(num_ready=5)}, now=(7 + second) * SECOND, began_at=7 * SECOND)))

    assert [at(second) for second in (0, 9, 10, 59, 60, 99, 100, 109, 110)] == [5, 5, 2, 2, 8, 8, 8, 8, 2]


def test_a_step_may_leave_a_role_alone() -> None:
    policy = Schedule(steps=(Step(at_s=0, prefill=2, decode=3), Step(at_s=50, prefill=6)))
    assert both(policy(disaggregated({}, {}))) == (6, 3)
    assert one(Schedule(steps=(Step(at_s=0, prefill=2),))(colocated(num_ready=4))) == 4


# -- configuration

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "blitz", "prefill_lower_s": 0.8}, r"prefill_lower_s must be below prefill_upper_s \(0\.8\), not 0\.8"),
    ({"kind": "blitz", "decode_lower": 0.96}, r"decode_lower must be below decode_upper \(0\.95\)"),
    ({"kind": "blitz", "migration_lower_s": 0}, "migration_lower_s must be above 0, not 0"),
    ({"kind": "blitz", "decode_upper": 1.5}, "decode_upper is a share"),
    ({"kind": "ttft", "ttft_s": 0}, "ttft_s must be above 0"),
    ({"kind": "ttft", "lower": 0.9}, r"lower must be below upper \(0\.7\)"),
    ({"kind": "ttft", "kv_upper": 1.2}, "kv_upper is a share"),
    ({"kind": "ttft", "window_s": -1}, "window_s must be above 0"),
    ({"kind": "concurrency", "target": 0}, "target must be above 0"),
    ({"kind": "concurrency", "panic_threshold": 0.5}, "panic_threshold must be at least 1"),
    ({"kind": "concurrency", "panic_share": 2}, "panic_share is a share"),
    ({"kind": "concurrency", "stable_s": 1e-9}, r"panic_share of stable_s \(1e-09\) is .* a window of less than a millisecond"),
    ({"kind": "utilisation", "tolerance": 1}, "tolerance must be at least 0 and below 1"),
    ({"kind": "utilisation", "target_kv": 0}, "target_kv is a share"),
    ({"kind": "predictive", "window_s": 90000}, r"window_s must be below season_s \(86400"),
    ({"kind": "predictive", "ahead_s": -3}, "ahead_s must be at least 0"),
    ({"kind": "predictive", "max_correction": 0.5}, "max_correction must be at least 1"),
    ({"kind": "schedule", "steps": []}, "steps must name at least one step"),
    ({"kind": "schedule", "steps": [{"at_s": 5, "replicas": 1}, {"at_s": 5, "replicas": 2}]}, "in the order of their at_s"),
    ({"kind": "schedule", "steps": [{"at_s": 5}]}, "changes nothing"),
    ({"kind": "schedule", "steps": [{"at_s": -5, "replicas": 1}]}, "must be at least 0, not -5"),
    ({"kind": "schedule", "steps": [{"at_s": 5, "replicas": -1}]}, "replicas must be at least 0, not -1"),
    ({"kind": "schedule", "steps": [{"at_s": 5, "replicas": 1}], "period_s": 5}, "period_s must be above that"),
]


@pytest.mark.parametrize(("table", "message"), MISTAKES, ids=[f"{table['kind']}-{at}" for at, (table, _) in enumerate(MISTAKES)])
def test_what_cannot_be_meant_is_refused_with_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(table, Scale)


@pytest.mark.parametrize("kind", ["fixed", "blitz", "ttft", "concurrency", "utilisation", "predictive"])
def test_every_kind_has_defaults_that_hold_for_both_kinds_of_fleet(kind: str) -> None:
    policy = msgspec.convert({"kind": kind}, Scale)
    for view in (colocated(), disaggregated({}, {})):
        wanted = policy(view)
        assert set(wanted.counts) == set(view.roles)
        assert wanted.why
