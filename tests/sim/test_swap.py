"""Preemption by copies to host memory: by hand, and as properties."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec, from_tree
from squall.core.actions import AnyAction, Join, Preempt, RunSteps, SwapIn, SwapOut
from squall.core.events import AnyEvent
from squall.core.machine import Machine
from squall.core.metrics import Outcome
from squall.core.pipeline import replica_of
from squall.core.swap import SwappingReplica
from squall.core.types import MILLISECOND, MachineId, Nanos
from squall.errors import ConfigError
from squall.fleet_tables import Fleet, Handoff
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.batching import Batching, Sarathi, Vllm, VllmV0
from squall.sim.linear import Linear
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.sim.swap import Copying, with_copies
from squall.workload.spec import OfferedRequest
from tests.sim.test_equivalence import HANDOFFS, ONE_MS, TIES, UNEVEN, Case, cases, check, crowds

MS = MILLISECOND


def config(batching: Batching, block_size: int) -> Config:
    return Config(batching=batching, fleet=Fleet(replicas=1), replica=ReplicaSpec(block_size=block_size))


class Log:
    """What the replica does, and its pools after every event."""

    def __init__(self) -> None:
        self.done: list[tuple[Nanos, AnyAction]] = []
        self.machines: list[SwappingReplica] = []

    def created(self, _now: Nanos, _id: MachineId, machine: Machine) -> None:
        if isinstance(machine, SwappingReplica):
            self.machines.append(machine)

    def __call__(self, now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if id >= 0:
            self.done += [(now, a) for a in actions if isinstance(a, SwapOut | SwapIn | Join | RunSteps | Preempt)]


def test_two_requests_by_hand() -> None:
    """Blocks of 4 tokens, 4 of them; a step takes 1 ms and a block 3 ms. Both prompts fill one block and want 8 tokens.

    0-1 ms: both prompts, 1 token each. From then on each decode holds 2 blocks, for its tokens 5 to 8: four steps, until
    5 ms, when both have 5 tokens. Then both want a third block and none is free. The later one's 2 blocks are copied out, 6 ms:
    the first one's step takes 5-12 ms, and the other two 12-14 ms: it ends at 14 ms with 8 tokens. The later one comes back, with
    its 2 blocks, 6 ms: 14-21 ms, 6 tokens; 21-23 ms: 8 tokens. Nothing is computed twice.
    """
    log = Log()
    record = simulate(
        Config(
            batching=Vllm(8, 64, False, preemption="swap", swap_blocks=2),
            fleet=Fleet(replicas=1),
            replica=ReplicaSpec(block_size=4),
        ),
        [OfferedRequest(0, 0, 4, 8), OfferedRequest(1, 0, 4, 8)],
        Copying(Linear(fixed=ONE_MS), 3 * MS),
        4,
        log=log,
        created=log.created,
    )
    assert [(row.finished_at, row.preemptions, row.first_token_at) for row in record.requests] == [
        (14 * MS, 0, MS),
        (23 * MS, 1, MS),
    ]
    runs = [(now // MS, a.steps, a.num_decodes, a.decode_context, a.num_copied) for now, a in log.done if isinstance(a, RunSteps)]
    assert [run for run in runs if run[-1]] == [(5, 1, 1, 9, 2), (14, 1, 1, 9, 2)]
    assert [(now // MS, a) for now, a in log.done if not isinstance(a, RunSteps)] == [
        (5, SwapOut((1,))), (14, SwapIn(1, 2)), (14, Join((1,), 0)),
    ]  # fmt: skip
    assert record.num_steps == 11
    (machine,) = log.machines
    assert machine.host.num_free == 2
    assert machine.pool.num_available == 4


def test_where_the_host_is_full_tokens_are_computed_again() -> None:
    log = Log()
    record = simulate(
        Config(
            batching=Vllm(8, 64, False, preemption="swap", swap_blocks=1),
            fleet=Fleet(replicas=1),
            replica=ReplicaSpec(block_size=4),
        ),
        [OfferedRequest(0, 0, 4, 8), OfferedRequest(1, 0, 4, 8)],
        Copying(Linear(fixed=ONE_MS), 3 * MS),
        4,
        log=log,
    )
    assert [a for _, a in log.done if not isinstance(a, RunSteps)] == [Preempt((1,))]
    assert [row.finished_at for row in record.requests] == [8 * MS, 11 * MS]  # one step computes its 9 tokens


@st.composite
def swapping(draw: st.DrawFn) -> Vllm | VllmV0 | Sarathi:
    seqs, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 80))
    watermark, cache, blocks = draw(st.sampled_from([0.0, 0.1])), draw(st.booleans()), draw(st.sampled_from([1, 4, 12, 1000]))
    quirks = draw(st.sampled_from(["none", "vidur"]))
    policies: tuple[Vllm | VllmV0 | Sarathi, ...] = (
        Vllm(seqs, max(seqs, tokens), cache, preemption="swap", swap_blocks=blocks),
        VllmV0(seqs, tokens, watermark, cache, quirks, preemption="swap", swap_blocks=blocks),  # type: ignore[arg-type]
        Sarathi(seqs, tokens, watermark, cache, quirks, preemption="swap", swap_blocks=blocks),  # type: ignore[arg-type]
    )
    return draw(st.sampled_from(policies))


def test_who_waits_in_host_memory_is_asked_again_after_a_preemption_that_left_more_room_than_was_needed() -> None:
    """Request 2 is copied out and fills the host; then request 1 is preempted, and its ten blocks are room for request 2."""
    sizes = ((1, 24, 30), (3, 38, 21), (4, 29, 16))
    requests = tuple(OfferedRequest(id, at * MS, prompt, output) for id, (at, prompt, output) in enumerate(sizes))
    policy = Sarathi(8, 65, 0.0, False, "vidur", preemption="swap", swap_blocks=12)
    record, _ = check(Case(requests, num_blocks=22, block_size=4, batching=policy, latency=Copying(TIES, 1)))  # type: ignore[arg-type]
    assert sum(row.preemptions for row in record.requests) >= 2


COPIES = st.sampled_from([Copying(TIES, MS), Copying(UNEVEN, 123_457), Copying(TIES, 1)])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(cases(), crowds()), swapping(), COPIES)
def test_any_run_with_copies_equals_single_steps(case: Case, batching: Batching, latency: Copying) -> None:
    check(replace(case, batching=batching, latency=latency))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(cases(), crowds()), swapping(), COPIES, st.integers(1, 3), HANDOFFS)
def test_any_run_of_a_disaggregated_fleet_with_copies_equals_single_steps(
    case: Case, batching: Batching, latency: Copying, decodes: int, handoff: Handoff
) -> None:
    check(replace(case, batching=batching, latency=latency, decodes=decodes, handoff=handoff))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crowds(), swapping(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 29)), max_size=5))
def test_blocks_are_conserved_in_both_memories_and_everybody_ends(
    case: Case, batching: Batching, gone: list[tuple[int, int]]
) -> None:
    """Every copy out is followed by at most one copy in, of as many blocks; the pools are whole in the end."""
    log = Log()
    away: dict[int, None] = {}

    def watch(now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        log(now, id, event, actions)
        for action in actions:
            if isinstance(action, SwapOut):
                for request in action.requests:
                    assert request not in away
                    away[request] = None
            elif isinstance(action, SwapIn):
                del away[action.request]
        for machine in log.machines:
            assert 0 <= machine.host.num_free <= machine.host.num_blocks
            assert 0 <= machine.pool.num_available <= machine.num_blocks
            assert machine.host.num_blocks - machine.host.num_free == sum(s.work.blocks for s in machine._swapped)

    cancellations = []
    for after, number in gone:
        request = case.requests[number % len(case.requests)]
        cancellations.append((request.arrived_at + after * MS, request.id))
    cancelled = {request for _, request in cancellations}
    record = simulate(
        config(batching, case.block_size),
        case.requests,
        Copying(TIES, MS),
        case.num_blocks,
        cancellations=cancellations,
        log=watch,
        created=log.created,
    )
    for row in record.requests:
        assert row.outcome is Outcome.COMPLETED or (row.outcome is Outcome.CANCELLED and row.id in cancelled)
    assert set(away) <= cancelled
    (machine,) = log.machines
    assert machine.host.num_free == machine.host.num_blocks
    assert machine.pool.num_available == machine.num_blocks
    assert machine.num_running == machine.num_waiting == 0


def test_a_block_costs_its_bytes_over_the_host_link() -> None:
    """Llama-3-8B: 8 heads of 128 values, keys and values of 2 bytes in 32 layers: 131,072 bytes a token, 16 tokens a block."""
    tree = {
        "cluster": {"gpu": "a100-80g", "host_gbps": 128.0},
        "batching": {"preemption": "swap", "swap_blocks": 100},
        "replica": {"block_size": 16},
    }
    wanted = from_tree("here", tree)
    model, gpu = resolve_model("llama-3-8b"), resolve_gpu("a100-80g")
    latency, _ = prepare(wanted, model, gpu)
    run = RunSteps(1, 1, 4, 4000)
    copying = with_copies(wanted, model, gpu, latency)
    (plain,), (one,) = latency.run(run, 1), copying.run(replace(run, num_copied=10), 1)
    assert copying.run(run, 1) == [plain]
    assert (one.first - plain.first) // 16 == 10 * round(16 * 131_072 / (128e9 / 8) * 1e9)


def test_gpus_that_share_a_host_link_copy_their_parts_one_after_the_other() -> None:
    """An A100's node has one link for two GPUs: at tp 2 each has half a block, and both halves pass the one link."""
    model, gpu = resolve_model("llama-3-8b"), resolve_gpu("a100-80g")
    costs = []
    for tp in (1, 2, 4):
        wanted = replace(config(Vllm(preemption="swap", swap_blocks=100), 16), replica=ReplicaSpec(block_size=16, tp=tp))
        latency, _ = prepare(wanted, model, gpu)
        (plain,), (one,) = (
            with_copies(wanted, model, gpu, latency).run(RunSteps(1, 1, 4, 4000, num_copied=copied), 1) for copied in (0, 1000)
        )
        costs.append(one.first - plain.first)
    assert costs[1] == pytest.approx(costs[0], rel=1e-3)
    assert costs[2] == pytest.approx(costs[0] / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"batching": {"preemption": "swap"}}, "swap_blocks must be at least 1"),
        ({"batching": {"swap_blocks": 5}}, 'swap_blocks = 5 is for preemption = "swap"'),
        ({"batching": {"kind": "sarathi", "preemption": "drop"}}, "one of recompute, swap"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tree: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_tree("here", tree)


def test_pipelines_are_refused() -> None:
    policy = Vllm(preemption="swap", swap_blocks=5)
    with pytest.raises(ValueError, match="one pipeline stage"):
        replica_of(0, policy, 10, 4, 2)
    model, gpu = resolve_model("llama-3-8b"), resolve_gpu("a100-80g")
    several = Config(batching=policy, replica=ReplicaSpec(pp=2))
    with pytest.raises(ConfigError, match="one pipeline stage"):
        with_copies(several, model, gpu, TIES)
