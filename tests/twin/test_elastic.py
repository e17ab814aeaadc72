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


GROWS = "fleet.replicas={min=1, max=4}"
ROLES = ["fleet.mode=disaggregated", "fleet.prefill={min=1, max=4}"]


def step(numbers: str) -> str:
    return f'scale={{kind="schedule", steps=[{{at_s=0, {numbers}}}]}}'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["scale.kind=ttft"], "scale.kind means nothing in a fleet of a fixed size; give fleet.replicas bounds, such as"),
        (
            ["fleet.mode=disaggregated", "scale.kind=blitz"],
            "give fleet.prefill, fleet.decode bounds, such as { min = 1, max = 4 }",
        ),
        (["fleet.pools=[{replicas=2}]", "scale.kind=ttft"], "pools do not scale, or leave [scale] out"),
        (["fleet.pools=[{replicas=2}]", "load={kind='chain', live=true}"], "load.live means nothing beside [[fleet.pools]]"),
        (
            [GROWS, step("prefill=2")],
            "scale.steps[0].prefill = 2 means nothing where fleet.mode = 'colocated'; there it is replicas",
        ),
        (
            [*ROLES, step("replicas=2")],
            "scale.steps[0].replicas = 2 means nothing where fleet.mode = 'disaggregated'; there it is",
        ),
        (
            [GROWS, step("replicas=5")],
            "scale.steps[0].replicas = 5 is out of the bounds of fleet.replicas; choose a number from min",
        ),
        ([*ROLES, step("prefill=0")], "scale.steps[0].prefill = 0 is out of the bounds of fleet.prefill"),
    ],
)
def test_a_policy_without_anything_to_decide_is_refused_with_the_key_and_the_fix(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "settings", [["load={kind='chain', live=true}"], [GROWS, "scale.kind=ttft"], [GROWS, step("replicas=4")]]
)
def test_what_means_something_is_taken(settings: list[str]) -> None:
    """A fixed fleet loads, too: in place of a replica that is lost."""
    load(None, settings)


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
