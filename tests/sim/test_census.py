"""How large an elastic fleet was, and how long new replicas took: known to the digit where a schedule says when they come."""

from pathlib import Path

import pytest

from squall import config as configuration
from squall.config import Slo
from squall.core.types import SECOND
from squall.report.compare import headline
from squall.report.summary import summarise
from squall.twin.rehearse import rehearse

BUSY = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "workload={kind='synthetic', num_requests=101, arrivals={kind='fixed', rate_rps=1.0}, prompt={kind='fixed', tokens=100}, "
    "output={kind='fixed', tokens=1}}",
)
ELASTIC = (
    *BUSY,
    "fleet.down_window_s=0.001",
    "load={kind='mock', load_s=5.0}",
    "startup.process_s=1.0",
    "run.duration_s=100",
)


def test_a_schedule_is_counted_to_the_second() -> None:
    steps = "[{at_s=20, replicas=3}, {at_s=60, replicas=2}]"
    config = configuration.load(None, [*ELASTIC, "fleet.replicas={min=1, max=4}", f"scale={{kind='schedule', steps={steps}}}"])
    record = rehearse(config)
    assert record.fleet is not None
    [both] = record.fleet.roles
    assert (both.role, both.min, both.max) == ("both", 1, 3)
    assert both.mean == pytest.approx((26 * 1 + 34 * 3 + 40 * 2) / 100, abs=0.01)  # two are ready 6 s after they are wanted
    assert record.fleet.ready_after == (6 * SECOND, 6 * SECOND)
    assert (record.scale_ups, record.scale_downs) == (2, 1)
    assert [(each.at // SECOND, each.role, each.before, each.after) for each in record.decisions] == [
        (20, "both", 1, 3), (60, "both", 3, 2),
    ]  # fmt: skip
    assert all(each.why for each in record.decisions)
    took = [(each.kind, each.began_at / SECOND, each.took / SECOND, each.num_bytes) for each in record.weights]
    assert took == [("mock", 21, 5, 0)] * 2  # and the first one was there from the beginning


def test_what_a_replica_can_do_is_told_and_what_of_that_was_given() -> None:
    settings = [*ELASTIC, "fleet.replicas={min=1, max=4}", "capacity.prefill_tokens_per_s=12000", "scale.kind=blitz"]
    record = rehearse(configuration.load(None, settings))
    assert record.fleet is not None
    capacity = record.fleet.capacity
    assert capacity is not None
    assert (capacity.prefill_tokens_per_s, capacity.load_s) == (12_000, 6.0)
    assert set(capacity.derived) == {"decode_tokens_per_s", "transfer_tokens_per_s", "load_s", "num_blocks"}
    found = summarise(record, Slo(), None)
    assert found.capacity == capacity
    [line] = [line for line in headline(found) if line.startswith("  each ")]
    assert "12,000 prompt tok/s (given)" in line
    assert "6 s to load" in line
    assert line.count("given") == 1


COLD_START = Path(__file__).resolve().parents[2] / "examples" / "cold-start.toml"


@pytest.mark.parametrize(
    ("cold", "phases", "ready_s"),
    [
        ("true", (52, 2, 30, 20, 316), 420),  # the deployment's 7 min
        ("['process', 'context', 'capture']", (52, 2, 30, 20, 0), 104),  # and 1 min 44 s
        ("['jit']", (0, 0, 30, 0, 316), 346),
        ("false", (0, 0, 30, 0, 0), 30),
    ],
)
def test_each_phase_of_coming_up_is_warm_or_cold_by_itself(cold: str, phases: tuple[int, ...], ready_s: int) -> None:
    config = configuration.load(COLD_START, [f"startup.cold={cold}"])
    record = rehearse(config)
    assert record.fleet is not None
    assert record.fleet.ready_after == (ready_s * SECOND,)
    found = summarise(record, Slo(), None)
    assert found.startup_s == dict(zip(("process", "context", "weights", "capture", "jit"), phases, strict=True))
    assert found.capacity is not None
    assert found.capacity.load_s == ready_s  # what scale policies are told to expect
    assert any("coming up" in line for line in headline(found)) == (cold != "false")
    first = min(row.scheduled_at for row in record.requests if row.replica == 1)
    assert first >= (10 + ready_s) * SECOND


def test_each_role_is_counted_for_itself() -> None:
    steps = "[{at_s=50, prefill=2, decode=1}]"
    bounds = ("fleet.mode=disaggregated", "fleet.prefill={min=1, max=3}", "fleet.decode={min=1, max=3}")
    record = rehearse(configuration.load(None, [*ELASTIC, *bounds, f"scale={{kind='schedule', steps={steps}}}"]))
    assert record.fleet is not None
    prefill, decode = record.fleet.roles
    assert (prefill.role, prefill.min, prefill.max) == ("prefill", 1, 2)
    assert prefill.mean == pytest.approx(1.44, abs=0.01)
    assert (decode.role, decode.min, decode.max) == ("decode", 1, 1)
    assert decode.mean == pytest.approx(1.0)


def test_a_fleet_of_a_fixed_size_has_nothing_to_count() -> None:
    assert rehearse(configuration.load(None, BUSY)).fleet is None
