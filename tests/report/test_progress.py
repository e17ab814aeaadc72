"""A line that tells how far a simulation is: on a terminal only, and only where it takes long."""

import io
import time

import pytest

from squall.config import Config, Queue
from squall.core.types import MILLISECOND
from squall.report.progress import SimulationProgress, simulation_progress
from squall.sim.linear import Linear
from squall.sim.observe import watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest


def play(shown: SimulationProgress, *requests: OfferedRequest) -> None:
    log, created = watched([shown])
    simulate(Config(queue=Queue(max_requests=8)), requests, Linear(fixed=16 * MILLISECOND), 10, log=log, created=created)


def test_whoever_ended_is_counted_however_it_ended() -> None:
    shown = SimulationProgress(io.StringIO())
    shown.phase("simulating", 3)
    play(shown, OfferedRequest(0, 0, 10, 4), OfferedRequest(1, 0, 100_000, 4), OfferedRequest(2, 0, 10, 4))
    assert (shown.num_done, shown.now) == (3, 4 * MILLISECOND)
    assert shown.line().startswith("simulating: 3 of 3 requests (100 %), 0 s simulated, ")


def test_before_the_first_event_it_tells_what_is_made() -> None:
    shown = SimulationProgress(io.StringIO())
    shown.phase("reading the workload")
    assert shown.line() == "reading the workload, 0 s"
    shown.num_machines = 1_002
    assert shown.line() == "reading the workload, 1,002 machines made, 0 s"


def test_the_line_is_drawn_over_itself_and_taken_away_at_the_end() -> None:
    stream = io.StringIO()
    with SimulationProgress(stream, after_s=0.0, every_s=0.001) as shown:
        shown.phase("simulating", 1)
        while stream.getvalue().count("simulating") < 2:
            time.sleep(0.001)
    assert stream.getvalue().startswith("\r\x1b[K")
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_a_short_simulation_shows_nothing() -> None:
    stream = io.StringIO()
    with SimulationProgress(stream) as shown:
        play(shown, OfferedRequest(0, 0, 10, 4))
    assert stream.getvalue() == ""


def test_without_a_terminal_nobody_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with simulation_progress() as shown:
        assert shown is None
    assert capsys.readouterr().err == ""
