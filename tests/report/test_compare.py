"""Runs side by side: numbers, how they relate, and whether the runs did the same work."""

import io
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from rich.console import Console

from squall.core.metrics import RoleUse
from squall.report.compare import Line, differences, headline, lines, table, warnings, written
from squall.report.run import StoredRun
from squall.report.sample import Distribution
from squall.report.summary import Summary

Stored = Callable[..., StoredRun]


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ((2.0, 2.2), "+10.0 %"),
        ((2.0, 1.9), "-5.0 %"),
        ((1.0, 1.0), "+0.0 %"),
        ((1.0, 30.0), "x 30"),
        ((30.0, 1.0), "x 0.0333"),
        ((0, 0), ""),
        ((0, 3), ""),
        ((3, 0), "-100 %"),
        ((None, 3), ""),
        ((3, None), ""),
    ],
)
def test_a_change_is_percent_up_to_a_factor_of_two(values: tuple[float | None, float | None], change: str) -> None:
    assert Line("TTFT", "s", values).change(1) == change


def test_numbers_are_written_for_people() -> None:
    assert [written(value) for value in (None, 0, 1234567, 12345.678, 0.123456, 5.0)] == [
        "-",
        "0",
        "1,234,567",
        "12,345.7",
        "0.1235",
        "5",
    ]


def test_metrics_that_no_run_has_are_left_out(stored: Stored) -> None:
    one = stored("one").summary
    names = [line.name for line in lines([one, one])]
    assert "TTFT p99" in names
    assert "SLO attainment" in names
    alone = stored("single", tokens=1, num_requests=3).summary
    assert "TPOT p50" not in [line.name for line in lines([alone])]


def elastic(summary: Summary, decode: int) -> Summary:
    sizes = {"prefill": RoleUse("prefill", 1, 1.5, 3), "decode": RoleUse("decode", 1, 1.25, decode)}
    ready = Distribution(2.0, 2.0, 3.0, 3.0, 3.0, 3.0)
    return replace(summary, replicas=sizes, scale_ups=4, scale_downs=3, time_to_ready_s=ready, gpu_seconds=1800.0, cost_usd=2.0)


def test_fleets_that_changed_are_told_of_and_others_are_not(stored: Stored) -> None:
    fixed = stored("fixed").summary
    assert not any("replicas" in line for line in headline(fixed))
    assert not any("replicas" in line.name for line in lines([fixed, fixed]))
    told = headline(elastic(fixed, 2))
    assert (
        "  replicas    prefill 1 to 3, 1.5 on average; decode 1 to 2, 1.25 on average; 4 added, 3 removed; "
        "new ones ready after p50 2 s, max 3 s"
    ) in told
    assert "  cost        2 USD for 1,800 GPU seconds (0.5 GPU hours)" in told
    values = {line.name: line.values for line in lines([fixed, elastic(fixed, 2), elastic(fixed, 5)])}
    named = [values[name] for name in ("replicas added", "decode replicas max", "time to ready p90")]
    assert named == [(0, 4, 4), (None, 2, 5), (None, 3.0, 3.0)]
    alike = replace(elastic(fixed, 2), replicas={"both": RoleUse("both", 1, 2.0, 4)})
    assert "  replicas    1 to 4, 2 on average; 4 added, 3 removed; new ones ready after p50 2 s, max 3 s" in headline(alike)
    assert {line.name: line.values for line in lines([alike])}["replicas mean"] == (2.0,)


def test_the_table_shows_every_run_and_its_relation_to_the_first(stored: Stored) -> None:
    fast, slow = stored("fast").summary, stored("slow", tpot_ms=100).summary
    console = Console(file=io.StringIO(), width=120)
    console.print(table(["fast", "slow"], [fast, slow]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (tbt,) = [line.split() for line in text.splitlines() if line.startswith("TBT p50")]
    assert tbt == ["TBT", "p50", "(s)", "0.05", "0.1", "x", "2"]


def test_two_runs_of_the_same_second_and_their_names_fit_into_80_columns(stored: Stored) -> None:
    one = stored("one").summary
    console = Console(file=io.StringIO(), width=80)
    console.print(table(["replay-20261130-080351-2", "simulate-20261130-080351-2"], [one, one]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in text.splitlines()[:2]] == [
        ["replay", "simulate"],
        ["20261130-080351-2", "20261130-080351-2"],
    ]


def test_the_same_work_is_not_called_different_for_a_late_send_or_a_token(stored: Stored) -> None:
    lives = stored().lives()
    again = replace(lives, arrived_at=lives.arrived_at + 40_000_000, num_prompt_tokens=lives.num_prompt_tokens + 1)
    assert differences(lives, again) == []


def test_different_work_is_said_so(stored: Stored) -> None:
    one = stored("one")
    assert warnings([one, stored("same"), one]) == []
    (said,) = warnings([one, stored("fewer", num_requests=19), one])
    assert said.endswith("fewer: 20 requests against 19")
    (said,) = warnings([one, stored("longer", tokens=9)])
    assert said.endswith("longer: 95 output tokens against 171")
    lives = one.lives()
    assert differences(lives, replace(lives, arrived_at=lives.arrived_at * 2)) == ["arrivals up to 19 s apart"]
