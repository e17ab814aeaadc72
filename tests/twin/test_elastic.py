"""An elastic fleet from a configuration file: weights over the cluster's links, and a log that can be reproduced."""

from pathlib import Path

import pytest

from squall.config import load
from squall.core.actions import Decided
from squall.core.metrics import Outcome
from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.eventlog import read
from squall.twin.observe import observe
from squall.twin.rehearse import rehearse, rehearse_with_events

ELASTIC = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "cluster.ssd_gbps=80",
    "fleet.replicas={min=1, max=4}",
    "fleet.down_window_s=5",
    "scale={kind='ttft', ttft_s=0.5}",
    "workload.kind=synthetic",
    "workload.num_requests=600",
    "workload.arrivals={kind='poisson', rate_rps=20.0}",
    "workload.prompt={kind='uniform', low=500, high=3000}",
    "workload.output={kind='uniform', low=1, high=80}",
)


def test_a_grown_fleet_is_reproduced_from_its_log_decision_by_decision(tmp_path: Path) -> None:
    record, events = rehearse_with_events(load(None, [*ELASTIC, "hazards.replica_per_hour=200"]))
    (tmp_path / "log").write_bytes(events)
    records = list(read(tmp_path / "log"))
    whys = [action.why for line in records for action in line.actions if isinstance(action, Decided)]
    assert whys
    assert all(whys)
    assert record.scale_ups >= 1
    observation = observe(records)
    assert observation.exact, str(observation.mismatches[0])


def test_weights_take_as_long_as_their_bytes_over_the_slowest_link() -> None:
    """16.06 GB over a GPU's share (an eighth) of 10 GB/s."""
    settings = ["fleet.replicas={min=0, max=1, initial=0}", "startup.process_s=1"]
    record = rehearse(load(None, [*ELASTIC, "workload.num_requests=1", *settings]))
    assert record.scale_ups == 1
    waited = (record.requests[0].scheduled_at - record.requests[0].arrived_at) / SECOND
    assert 13.8 < waited < 13.9
    assert record.gpu_nanos < 16 * SECOND


def test_gpu_time_is_counted_only_while_it_is_held() -> None:
    record = rehearse(load(None, ELASTIC))
    most = record.ended_at * 4
    assert record.ended_at < record.gpu_nanos < most


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["fleet.replicas={min=3, max=2}"], "fleet.replicas: min = 3 is more than max = 2; lower min or raise max"),
        (["fleet.replicas={min=1, max=2, initial=5}"], "initial = 5 is out of bounds; choose a number from min = 1 to max = 2"),
        (["fleet.mode=disaggregated", "fleet.prefill={min=0, max=2}"], "fleet.prefill.min = 0 lets the role vanish"),
        (["fleet.prefill=2"], "fleet.prefill means nothing where fleet.mode = 'colocated'; there it is fleet.replicas"),
        (
            ["cluster.gpu=h100-sxm", "fleet.replicas=9"],
            "may grow to 9 replicas of 1 GPU, and 1 x 8 GPUs have place for 8",
        ),
        (["cluster.gpu=h100-sxm", "replica.tp=4", "fleet.replicas={min=1, max=3}"], "have place for 2; raise cluster.nodes"),
        (["fleet.idle_ttl_s=0"], "fleet.idle_ttl_s = 0"),
        (["cluster.nic_gbps=0"], "cluster.nic_gbps = 0"),
        (["faults=[{at_s=1, kind='meteor', which=0}]"], "faults"),
    ],
)
def test_a_fleet_that_cannot_be_meant_is_one_line_with_the_key_and_the_fix(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_roles_share_the_gpus() -> None:
    """Each may take all that the other's fewest leave."""
    apart = ["cluster.gpu=h100-sxm", "fleet.mode=disaggregated", "fleet.prefill={min=1, max=7}"]
    assert load(None, [*apart, "fleet.decode={min=1, max=7}"]).fleet.num_maximum == 14
    with pytest.raises(ConfigError, match="may grow to 9 replicas of 1 GPU, and 1 x 8 GPUs have place for 8"):
        load(None, [*apart, "fleet.decode={min=1, max=8}"])
    with pytest.raises(ConfigError, match="have place for 8"):
        load(None, [*apart, "fleet.decode={min=2, max=2}"])


def test_a_disaggregated_fleet_is_read_and_simulated() -> None:
    config = load(None, [*ELASTIC[:2], "fleet.mode=disaggregated", "fleet.prefill={min=1, max=3}", *ELASTIC[5:]])
    record = rehearse(config)
    assert record.requests
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
