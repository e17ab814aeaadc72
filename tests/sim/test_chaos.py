"""Whatever breaks, whoever leaves and whatever is wanted: requests end once, nothing stays held, decisions can be repeated."""

from pathlib import Path

import pytest

from squall.core.events import HandedOver, ReplicaLost, StepsDone, Woke
from tests.sim.chaos import Case, Log, by_chance, case, check, check_replay, play, tally

KINDS = pytest.mark.parametrize(("mode", "live"), [(m, live) for m in ("colocated", "disaggregated") for live in (True, False)])


def said(log: Log) -> list[tuple[object, ...]]:
    """All but the ends of runs of steps and wake-ups, which are others with single steps."""
    return [entry[:3] for entry in log if not isinstance(entry[2], StepsDone | Woke)]


def go_through(seed: int, mode: str, path: Path, *, live: bool) -> Log:
    """One case, in all ways."""
    return go(case(seed, mode, live=live), path)


def go(of: Case, path: Path) -> Log:
    many = play(of, path=path)
    check(of, many)
    check_replay(of, many, path)
    single = play(of, max_steps=1)
    assert said(many.log) == said(single.log)
    assert many.record.requests == single.record.requests
    return many.log


# Seeds that told of something: a dead link that never came back, KV that could not be sent by the source of a pair, a target
# that was stopped in the middle of its layers, one that was announced before it had given everything back, an offer that took the
# place of a failed one which was still being written to, clients that left what was held while its target died or the source had
# other things to do, a replica that was stopped with a part of what another one held.
FOUND = {
    ("colocated", True): (28, 45, 75, 210, 215),
    ("disaggregated", True): (9, 21, 57, 62, 3058, 3111, 3113, 4004, 4040, 4057, 4226),
    ("disaggregated", False): (32, 40),
}


@KINDS
def test_a_few_runs_in_which_anything_may_break(mode: str, live: bool, tmp_path: Path) -> None:
    for seed in (*range(1000, 1006), *FOUND.get((mode, live), ())):
        go_through(seed, mode, tmp_path / str(seed), live=live)


@KINDS
def test_a_few_runs_in_which_all_hazards_strike(mode: str, live: bool, tmp_path: Path) -> None:
    for seed in range(6):
        go(by_chance(case(seed, mode, live=live), seed), tmp_path / str(seed))


def test_a_hundred_scale_events_and_what_holds_in_all_of_them() -> None:
    """Ten thousand of them: `python -m tests.sim.chaos`."""
    found = tally(100, 60, 20)
    assert found.broken == []
    assert found.events >= 100
    assert found.lost > 5
    assert found.handed > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@KINDS
def test_many_runs_in_which_anything_may_break(mode: str, live: bool, tmp_path: Path) -> None:
    num_lost = num_shared = 0
    for seed in range(250):
        log = go_through(seed, mode, tmp_path / "log", live=live)
        (tmp_path / "log").unlink()
        num_lost += sum(isinstance(entry[2], ReplicaLost) for entry in log)
        num_shared += sum(isinstance(entry[2], HandedOver) for entry in log)
    assert num_lost > 50
    assert (num_shared > 500) == live
