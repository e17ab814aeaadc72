"""A log of a disaggregated fleet in which things break, fed to fresh machines, reproduces every action."""

from pathlib import Path

from msgspec.structs import replace

from squall.config import Cluster, Config
from squall.core.types import MILLISECOND, SECOND
from squall.eventlog import open_log, read
from squall.fleet_tables import Fault, Fleet, Handoff, Replicas
from squall.policies.batching import Vllm
from squall.policies.scale import Concurrency
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.twin.observe import observe
from squall.workload.spec import OfferedRequest


def test_every_action_of_a_disaggregated_fleet_is_reproduced(tmp_path: Path) -> None:
    few = Replicas(1, 3)
    config = Config(
        fleet=Fleet("disaggregated", prefill=few, decode=few, up_interval_s=0.1, down_window_s=0.5, idle_ttl_s=0.2),
        scale=Concurrency(target=4),
        batching=Vllm(16, 256),
        handoff=Handoff(delay_s=0.03, max_share=2.0),
        cluster=Cluster("h100-sxm", 1, 6),
        faults=(Fault(1.0, "replica", 0), Fault(1.7, "replica", 1)),
    )
    config = replace(config, queue=replace(config.queue, max_retries=10))
    requests = [OfferedRequest(id, id * SECOND // 30, 100 + id % 50, 40) for id in range(100)]
    with open_log(tmp_path / "log") as log:
        simulate(
            config, requests, Linear(160 * MILLISECOND), 60,
            cancellations=[(SECOND, 20), (SECOND + 1, 25)], log=log.record, created=log.created,
        )  # fmt: skip
    observation = observe(read(tmp_path / "log"))
    assert observation.exact, observation
    assert sum(observation.num_events.values()) > 500
