"""A rehearsal's event log: what a simulated run wrote down must reproduce every action, as a live run's does."""

from pathlib import Path

import pytest

from squall.config import Cluster, Config, load
from squall.errors import ConfigError
from squall.eventlog import read
from squall.fleet_tables import Fleet, Replicas
from squall.twin import rehearse as rehearsal
from squall.twin.observe import observe
from squall.twin.rehearse import rehearse, rehearse_with_events, usd_per_gpu_hour

SETTINGS = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "fleet.replicas=2",
    "replica.num_blocks=300",  # tight enough to preempt
    "workload.kind=synthetic",
    "workload.num_requests=80",
    'workload.arrivals={kind="poisson", rate_rps=40}',
    'workload.prompt={kind="uniform", low=100, high=900}',
    'workload.output={kind="uniform", low=1, high=300}',
)


@pytest.mark.parametrize("route", ["least_loaded", "pull", "prefix_affinity"])
def test_a_simulated_run_is_reproduced_from_its_log(tmp_path: Path, route: str) -> None:
    config = load(None, [*SETTINGS, f"route.kind={route}"])
    record, log = rehearse_with_events(config)
    (tmp_path / "events.jsonl.zst").write_bytes(log)
    records = list(read(tmp_path / "events.jsonl.zst"))
    assert sum(r.event is not None for r in records) == record.num_events
    assert sum(row.preemptions for row in record.requests) > 0
    observation = observe(records)
    assert observation.exact
    assert sum(observation.num_events.values()) == record.num_events


def test_writing_the_log_changes_nothing() -> None:
    config = load(None, SETTINGS)
    with_log, without = rehearse_with_events(config)[0], rehearse(config)
    assert with_log.requests == without.requests
    assert with_log.gaps == without.gaps


def test_a_series_that_is_sure_to_be_too_fine_is_refused_before_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "simulate", lambda *_, **__: pytest.fail("it was simulated"))
    with pytest.raises(ConfigError, match=r"run\.series_s is 1e-09, too fine for .* rows; use .* or more"):
        rehearse(load(None, [*SETTINGS, "run.series_s=1e-9"]))


@pytest.mark.parametrize(
    "fleet",
    [
        Fleet(replicas=Replicas(0, 2, 0)),
        Fleet(mode="disaggregated", prefill=Replicas(0, 2, 0), decode=Replicas(0, 2, 0)),
    ],
)
def test_a_fleet_that_begins_with_nobody_has_a_price(fleet: Fleet) -> None:
    assert usd_per_gpu_hour(Config(cluster=Cluster(gpu="h100-sxm", usd_per_gpu_hour=3.0), fleet=fleet)) == 3.0
