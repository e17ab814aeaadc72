"""An engine that only follows the rules of `core.actions` always has the blocks that the machine counts on."""

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squall.config import Config, ReplicaSpec
from squall.core.actions import AnyAction, Chunk, Forget, Preempt, RunSteps
from squall.core.events import AnyEvent, StepsDone
from squall.core.types import FOREVER, MILLISECOND, BlockHash, MachineId, Nanos, RequestId
from squall.fleet_tables import Fleet
from squall.policies.batching import Batching, BlitzBatching, LightLlm, Orca, Sarathi, Vllm, VllmV0
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

SIZE = 4


class Sequence_:
    """What an engine knows of a request."""

    def __init__(self, hashes: tuple[BlockHash, ...]) -> None:
        self.hashes = hashes
        self.tokens = 0
        self.blocks: list[int] = []
        self.group = -1  # with which it decodes


class BookkeepingEngine:
    """Physical blocks by number, a map from hashes to them, and nothing else: no counts, no order of eviction."""

    def __init__(self, num_blocks: int, requests: Sequence[OfferedRequest]) -> None:
        self.free = list(range(num_blocks))
        self.cached: dict[BlockHash, int] = {}
        self.users: dict[int, int] = dict.fromkeys(range(num_blocks), 0)
        self.sequences = {r.id: Sequence_(r.block_hashes) for r in requests}
        self.run: RunSteps | None = None
        self.num_evicted = 0

    def __call__(self, now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if id < 0:
            return
        if isinstance(event, StepsDone):
            self.step_through(event)
        for action in actions:
            if isinstance(action, Preempt | Forget):
                for request in action.requests:
                    self.release(request)
            elif isinstance(action, RunSteps):
                self.begin(action)

    def begin(self, run: RunSteps) -> None:
        self.run = run
        for moved in run.regrouped:
            for request in moved.requests:
                self.sequences[request].group = moved.group
        for chunk in run.chunks:
            sequence = self.sequences[chunk.request]
            if chunk.num_cached:
                sequence.blocks = [self.cached[block] for block in sequence.hashes[: chunk.num_cached // SIZE]]
                sequence.tokens = chunk.num_cached
                for block in sequence.blocks:
                    self.users[block] += 1
            assert sequence.tokens == chunk.offset

    def step_through(self, event: StepsDone) -> None:
        run = self.run
        assert run is not None
        assert event.run == run.run
        evictable = list(run.evictable)
        for step in range(event.steps):
            group = [sequence for sequence in self.sequences.values() if sequence.group == run.group]
            decodes = group if run.num_decodes else []
            assert len(decodes) == run.num_decodes
            assert sum(s.tokens + 1 for s in decodes) == run.decode_context + step * run.num_decodes
            for sequence in decodes:
                self.grow(sequence, 1, evictable)
            for chunk in run.chunks:
                self.grow(self.sequences[chunk.request], chunk.num_tokens, evictable, chunk.num_reserved)
            for chunk in run.chunks:
                self.share(self.sequences[chunk.request], chunk, run.group)
        for request in event.stopped:
            self.release(request)

    def grow(self, sequence: Sequence_, tokens: int, evictable: list[BlockHash], reserved: int = 0) -> None:
        sequence.tokens += tokens
        while len(sequence.blocks) < max(reserved, -(-sequence.tokens // SIZE)):
            if not self.free:
                block = self.cached.pop(evictable.pop(0))
                assert not self.users[block]
                self.free.append(block)
                self.num_evicted += 1
            block = self.free.pop()
            self.users[block] += 1
            sequence.blocks.append(block)

    def share(self, sequence: Sequence_, chunk: Chunk, group: int) -> None:
        """Of the blocks that this step completed. One whose hash was held then stays private, also when that one is evicted."""
        completed = slice((sequence.tokens - chunk.num_tokens) // SIZE, sequence.tokens // SIZE)
        for block, hash in zip(sequence.blocks[completed], sequence.hashes[completed], strict=False):
            self.cached.setdefault(hash, block)
        sequence.group = group if chunk.last else -1

    def release(self, request: RequestId) -> None:
        sequence = self.sequences[request]
        for block in sequence.blocks:
            self.users[block] -= 1
            if not self.users[block] and block not in self.cached.values():
                self.free.append(block)
        sequence.blocks = []
        sequence.tokens = 0
        sequence.group = -1


@st.composite
def crowds(draw: st.DrawFn) -> tuple[int, Batching, list[OfferedRequest]]:
    """Prompts that share beginnings, and little room."""
    requests = []
    at = 0
    for id in range(draw(st.integers(2, 20))):
        at += draw(st.integers(0, 4)) * MILLISECOND
        prompt = draw(st.integers(4, 40))
        shared, family = draw(st.integers(0, 10)), draw(st.integers(1, 2))
        hashes = tuple(family * 100 + i if i < shared else (id + 1) * 1000 + i for i in range(prompt // SIZE))
        requests.append(OfferedRequest(id, at, prompt, draw(st.integers(1, 30)), block_hashes=hashes))
    least = max(-(-(r.num_prompt_tokens + r.num_output_tokens) // SIZE) for r in requests)
    seqs = draw(st.integers(1, 6))
    tokens, cache = draw(st.integers(seqs, 30)), draw(st.booleans())
    kinds: list[Batching] = [
        Vllm(seqs, tokens, cache), Vllm(seqs, tokens, cache, whole_prompts=True), VllmV0(seqs, tokens, 0.1, cache),
        Sarathi(seqs, tokens, 0.1, cache), Orca(seqs, 30), LightLlm(seqs, tokens, 2), BlitzBatching(tokens, 40, seqs),
    ]  # fmt: skip
    policy = draw(st.sampled_from(kinds))
    return least + draw(st.integers(0, 8)), policy, requests


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crowds(), st.sampled_from([1, 3, FOREVER]), st.data())
def test_every_block_that_the_machine_counts_on_is_there(
    crowd: tuple[int, Batching, list[OfferedRequest]], max_steps: int, data: st.DataObject
) -> None:
    num_blocks, policy, requests = crowd
    if not policy.prefix_cache:
        requests = [OfferedRequest(r.id, r.arrived_at, r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    gone = data.draw(st.lists(st.tuples(st.integers(0, 100), st.sampled_from(requests)), max_size=3))
    engine = BookkeepingEngine(num_blocks, requests)
    simulate(
        Config(batching=policy, fleet=Fleet(replicas=1), replica=ReplicaSpec(block_size=SIZE)),
        requests,
        Linear(fixed=16 * MILLISECOND),
        num_blocks,
        cancellations=[(r.arrived_at + after * MILLISECOND, r.id) for after, r in gone],
        max_steps=max_steps,
        log=engine,
    )
    assert not any(engine.users.values())
    assert len(engine.free) + len(engine.cached) == num_blocks
