"""The paper's three pairs of model, traffic and cluster, and the systems that it compares, as configurations.

Clusters are those of the catalogue (`blitz-cluster-a`, `-b`), the host's PCIe link at 128 Gbps a GPU as the paper has it.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from benchmarks.blitz.traffic import TRACES, bursty, busiest, densified, means, rate, recorded
from squall.config import Cluster, Config, Model, Queue, ReplicaSpec, Run, load
from squall.core.metrics import RunRecord
from squall.deployment import full_plan
from squall.fleet_tables import Fleet, Replicas
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec
from squall.policies.batching import Vllm
from squall.policies.load import Load
from squall.policies.scale import Blitz, Scale
from squall.sim.ground import ground
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.sim.seats import EventLog
from squall.workload.spec import OfferedRequest

WINDOW_S = 300.0
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Pair:
    """A model, a trace and a cluster.

    Args:
        trace: "code" or "conv" (Azure's of 2023), or "burst" (`traffic.bursty`).
        idle_ttl_s: how long a replica without work is kept: the seed's templates say 333 ms on one GPU and on two, 1.5 s on four.
    """

    def __init__(self, name: str, model: str, trace: str, node: str, nodes: int, tp: int, idle_ttl_s: float) -> None:
        self.name, self.trace, self.idle_ttl_s = name, trace, idle_ttl_s
        gpu = "a800-80g" if node == "blitz-cluster-a" else "a100-80g-pcie"
        self.plain = Config(
            model=Model(model),
            cluster=Cluster(gpu=gpu, nodes=nodes, node=node, host_gbps=128.0),
            replica=ReplicaSpec(tp=tp),
            batching=Vllm(),
            queue=Queue(max_requests=1_000_000, max_tokens=1_000_000_000),
            run=Run(),
        )
        self.num_slots = nodes * 8 // tp

    @property
    def is_there(self) -> bool:
        """Its trace lies beside the checkout, or is generated."""
        return self.trace == "burst" or TRACES[self.trace].is_file()

    @cached_property
    def stands_on(self) -> tuple[ModelSpec, Gpu, LatencyModel, int]:
        """Model, GPU, prices of steps and KV blocks, for `ground` and `full_plan`."""
        model, gpu = resolve_model(self.plain.model.name), resolve_gpu(self.plain.cluster.gpu)
        latency, blocks = prepare(self.plain, model, gpu)
        return model, gpu, latency, blocks

    @cached_property
    def window(self) -> list[OfferedRequest]:
        """The traffic before it is scaled."""
        return bursty(20, WINDOW_S, 0) if self.trace == "burst" else busiest(recorded(self.trace), WINDOW_S)

    def split(self, num_slots: int) -> tuple[int, int, float]:
        """Prefill and decode replicas that serve most requests a second of this traffic together, and how many these are.

        By the capacities that the planner is given: prompt tokens a second, tokens a second of a full batch, KV over the NICs.
        """
        model, gpu, latency, blocks = self.stands_on
        capacity = full_plan(self.plain, model, gpu, latency, blocks).capacity
        assert capacity is not None
        prompt, output = means(self.window)
        prefill, decode = capacity.prefill_tokens_per_s / prompt, capacity.decode_tokens_per_s / output
        decode = min(decode, capacity.transfer_tokens_per_s / prompt)  # its NICs must bring the prompts' KV
        served = [(min(n * prefill, (num_slots - n) * decode), n) for n in range(1, num_slots)]
        most, prefills = max(served)
        return prefills, num_slots - prefills, most

    @cached_property
    def requests(self) -> list[OfferedRequest]:
        """Half of what the whole cluster can serve, on average."""
        wanted = self.split(self.num_slots)[2] / 2
        if self.trace == "burst":
            return bursty(wanted, WINDOW_S, 0)
        return densified(self.window, wanted / rate(self.window), 0)

    def fixed(self, num_slots: int) -> Config:
        """DistServe's way: a disaggregated fleet of a fixed size."""
        prefill, decode, _ = self.split(num_slots)
        return replace(self.plain, fleet=Fleet("disaggregated", prefill=prefill, decode=decode))

    def elastic(self, weights: Load, scale: Scale | None = None) -> Config:
        """One replica of each role that may become any number, by BlitzScale's planner unless said otherwise."""
        most = Replicas(1, self.num_slots - 1)
        fleet = Fleet("disaggregated", prefill=most, decode=most, down_window_s=self.idle_ttl_s, idle_ttl_s=self.idle_ttl_s)
        return replace(self.plain, fleet=fleet, scale=scale or Blitz(), load=weights)

    def play(self, config: Config, requests: Sequence[OfferedRequest], log: EventLog | None = None) -> RunRecord:
        model, gpu, latency, blocks = self.stands_on
        return simulate(config, requests, latency, blocks, ground=ground(config, model, gpu, latency, blocks), log=log)


def pairs() -> list[Pair]:
    return [
        Pair("72B/BurstGPT/A", "qwen2.5-72b", "burst", "blitz-cluster-a", 4, 4, 1.5),
        Pair("24B/AzureConv/A", "mistral-24b", "conv", "blitz-cluster-a", 4, 2, 0.333),
        Pair("8B/AzureCode/B", "llama-3-8b", "code", "blitz-cluster-b", 2, 1, 0.333),
    ]


SYSTEMS = {
    "ServerlessLLM": "baselines/serverlessllm",
    "AllCache": "baselines/allcache",
    "+Network": "baselines/network",
    "stop-the-world chain": "baselines/stop-the-world",
    "+Multicast": "baselines/multicast",
    "+ZigZag": "blitz-burst",
    "Knative-like": "baselines/knative",
}
"""Which of the examples says how each system scales and loads."""


def systems(pair: Pair) -> dict[str, Config]:
    """By name. Those that scale differ only in how weights come to a new replica, but for the last."""
    fixed = {"DistServe (full)": pair.fixed(pair.num_slots), "DistServe (half)": pair.fixed(pair.num_slots // 2)}
    examples = {name: load(EXAMPLES / f"{file}.toml") for name, file in SYSTEMS.items()}
    return fixed | {name: pair.elastic(example.load, example.scale) for name, example in examples.items()}
