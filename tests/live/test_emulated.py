"""The emulated engine: exact time, reproducible text, honest books."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.core.actions import AnyAction, Chunk, Cut, Forget, Preempt, Regrouped, RunSteps, Send
from squall.core.events import AnyEvent, Cancelled, Progressed, StepsDone, Submitted, Woke
from squall.core.replica import Replica
from squall.core.types import MICROSECOND, MILLISECOND, Nanos, Request
from squall.live.engine import emulated
from squall.live.engine.emulated import CATCH_UP, EmulatedEngine, Ledger, pseudo_token
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.tokenizer import ByteTokenizer
from squall.perf.latency import BatchShape, Progression
from squall.policies.batching import Vllm

TOKENIZER = ByteTokenizer()


class Constant:
    """Every step takes as long, and `growth` more than the one before in its run."""

    source = "constant"
    num_stages = 1

    def __init__(self, step: Nanos = 1, growth: Nanos = 0) -> None:
        self.step = step
        self.growth = growth

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        return [Progression(steps, self.step * 16, self.growth * 16)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return (self.step,)


class Clock:
    """A clock whose sleeps last a little longer than asked for, as real ones do."""

    OVERSHOOT = 60 * MICROSECOND

    def __init__(self) -> None:
        self.now: Nanos = 10**15

    def monotonic_ns(self) -> Nanos:
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.now += round(seconds * 1e9) + self.OVERSHOOT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulated, "time", SimpleNamespace(monotonic_ns=clock.monotonic_ns, sleep=clock.sleep))
    return clock


def engine(num_blocks: int = 64, block_size: int = 4, latency: Constant | None = None, dilation: float = 1.0) -> EmulatedEngine:
    return EmulatedEngine(latency or Constant(), num_blocks, block_size, 1024, TOKENIZER, dilation)


def job(request: int = 1, prompt: int = 4, max_tokens: int = 8, seed: int = 7, **more: Any) -> Job:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, **more)
    return Job(request, tuple(range(prompt)), sampling)


def prefill(run: int, request: int, tokens: int, offset: int = 0, last: bool = True) -> RunSteps:
    return RunSteps(run, 1, 0, 0, (Chunk(request, offset, tokens, 0, last),))


def spoken(seed: int, count: int) -> list[int]:
    return [pseudo_token(TOKENIZER, seed, position) for position in range(count)]


def run(engine: EmulatedEngine, *actions: RunSteps) -> list[TokenOut]:
    heard: list[TokenOut] = []
    for action in actions:
        engine.run(action, heard.extend)
    return heard


# -- time


def test_a_run_lasts_as_predicted_and_late_wake_ups_do_not_add_up(clock: Clock) -> None:
    subject = engine(latency=Constant(MILLISECOND, growth=1000), dilation=2.0)
    subject.add(job(max_tokens=200))
    run(subject, prefill(1, 1, 4))
    began = clock.now
    run(subject, RunSteps(2, 100, 1, 5))
    predicted = 2 * sum(MILLISECOND + 1000 * step for step in range(100))
    assert 0 <= clock.now - began - predicted + Clock.OVERSHOOT <= 2 * Clock.OVERSHOOT


def test_our_own_work_between_runs_is_not_slept_again_but_idleness_is_not_made_up_for(clock: Clock) -> None:
    subject = engine(latency=Constant(20 * MILLISECOND))
    subject.add(job())
    run(subject, prefill(1, 1, 4))
    began = clock.now
    clock.now += MILLISECOND
    run(subject, RunSteps(2, 1, 1, 5))
    assert clock.now - began <= 20 * MILLISECOND + Clock.OVERSHOOT
    clock.now += 3600 * 1000 * MILLISECOND
    began = clock.now
    run(subject, RunSteps(3, 1, 1, 6))
    assert clock.now - began >= 20 * MILLISECOND - CATCH_UP
    subject.forget([1])
    clock.now += MILLISECOND
    began = clock.now
    subject.add(job(2))
    run(subject, prefill(4, 2, 4))
    assert clock.now - began >= 20 * MILLISECOND


# -- text


def test_tokens_depend_on_seed_and_position_alone() -> None:
    alone, batched, chunked = engine(), engine(), engine()
    alone.add(job())
    once = run(alone, prefill(1, 1, 4), RunSteps(2, 7, 1, 5))
    batched.add(job(5, seed=99))
    batched.add(job())
    mixed = run(batched, RunSteps(1, 1, 0, 0, (Chunk(5, 0, 4, 0, True), Chunk(1, 0, 4, 0, True))), RunSteps(2, 7, 2, 10))
    chunked.add(job())
    parts = run(chunked, prefill(1, 1, 3, last=False), prefill(2, 1, 1, offset=3), RunSteps(3, 7, 1, 5))
    tokens = [out.token for out in once]
    assert tokens == [out.token for out in mixed if out.request == 1] == [out.token for out in parts] == spoken(7, 8)


def test_text_is_printable_and_its_end_is_the_limit() -> None:
    subject = engine()
    subject.add(job(max_tokens=100))
    heard = run(subject, prefill(1, 1, 4), RunSteps(2, 99, 1, 5))
    text = "".join(out.text for out in heard)
    assert len(text) == 100
    assert text.isprintable()
    assert [out.finish for out in heard] == [None] * 99 + ["length"]


def test_a_continued_request_goes_on_where_it_was() -> None:
    subject = engine()
    said = tuple(spoken(7, 3))
    subject.add(Job(1, tuple(range(4)), Sampling(max_tokens=8, seed=7), output=said))
    heard = run(subject, prefill(1, 1, 7), RunSteps(2, 4, 1, 8))
    assert [out.token for out in heard] == spoken(7, 8)[3:]
    assert heard[-1].finish == "length"


def test_a_stop_string_ends_the_run_and_names_the_request() -> None:
    stop = TOKENIZER.decode(spoken(7, 5)[3:])
    subject = engine()
    subject.add(job(stop=(stop,), max_tokens=50))
    run(subject, prefill(1, 1, 4))
    heard: list[TokenOut] = []
    ended = subject.run(RunSteps(2, 49, 1, 5), heard.extend)
    assert (ended.steps, ended.stopped) == (4, (1,))
    assert (heard[-1].finish, heard[-1].stop_reason) == ("stop", stop)


def test_a_logprob_is_that_of_the_only_possible_token() -> None:
    subject = engine()
    subject.add(job(logprobs=2))
    (out,) = run(subject, prefill(1, 1, 4))
    assert out.logprob is not None
    assert out.logprob.logprob == 0.0
    assert [top.token for top in out.top] == [out.token]


# -- runs


def test_a_cut_ends_the_run_at_the_next_boundary_even_when_it_came_first() -> None:
    subject = engine()
    subject.add(job(max_tokens=100))
    run(subject, prefill(1, 1, 4))
    subject.cut(2)
    assert subject.run(RunSteps(2, 50, 1, 5), lambda tokens: None).steps == 1
    heard: list[TokenOut] = []

    def emit(tokens: Sequence[TokenOut]) -> None:
        heard.extend(tokens)
        if len(heard) == 3:
            subject.cut(3)

    assert subject.run(RunSteps(3, 50, 1, 6), emit).steps == 3
    subject.cut(3)
    assert subject.run(RunSteps(4, 5, 1, 9), heard.extend).steps == 5


def test_decodes_pause_change_groups_and_reserve_blocks() -> None:
    subject = engine(num_blocks=12)
    for request in (1, 2):
        subject.add(job(request, max_tokens=20, seed=request))
    heard = run(
        subject,
        RunSteps(1, 1, 0, 0, (Chunk(1, 0, 4, 0, True, 6),)),
        RunSteps(2, 3, 1, 5),
        RunSteps(3, 1, 0, 0, (Chunk(2, 0, 4, 0, True),)),  # 1 pauses, 2 joins it
        RunSteps(4, 2, 1, 5, group=1, regrouped=(Regrouped(1, (2,)),)),
        RunSteps(5, 1, 2, 8 + 7, regrouped=(Regrouped(0, (2,)),)),
    )
    assert [out.token for out in heard if out.request == 1] == spoken(1, 5)
    assert [out.token for out in heard if out.request == 2] == spoken(2, 4)
    assert subject.ledger.num_held == 6 + 2
    subject.forget((1, 2))
    assert subject.ledger.num_held == 0


def test_a_machine_that_sees_other_decodes_than_there_are_is_told_so() -> None:
    subject = engine()
    subject.add(job())
    run(subject, prefill(1, 1, 4))
    with pytest.raises(RuntimeError, match=r"the machine sees 1 decodes over 9 tokens, the engine 1 over 5"):
        subject.run(RunSteps(2, 1, 1, 9), lambda tokens: None)


def test_more_blocks_than_there_are_is_an_error_and_not_a_bigger_pool() -> None:
    subject = engine(num_blocks=2)
    subject.add(job(prompt=9))
    with pytest.raises(RuntimeError, match="all 2 KV blocks are in use"):
        run(subject, prefill(1, 1, 9))


def test_the_ledger_evicts_what_it_was_told_and_nothing_in_use() -> None:
    ledger = Ledger(3)
    ledger.take(3, iter(()))
    assert [ledger.share(block) for block in (11, 12, 11)] == [True, True, False]
    ledger.release(1, [11, 12])
    assert (ledger.num_free, ledger.num_held) == (1, 0)
    ledger.use(12)
    ledger.take(2, iter((11,)))
    assert (ledger.num_free, ledger.num_held) == (0, 3)
    with pytest.raises(RuntimeError, match="evicting 12"):
        ledger.take(1, iter((12,)))


# -- the engine and the machine keep the same books


class Pair:
    """A replica's machine and its engine without processes: what the machine asks for is done at once."""

    def __init__(self, num_blocks: int, policy: Vllm) -> None:
        self.engine = engine(num_blocks)
        self.machine = Replica(0, policy, num_blocks, 4)
        self.policy = policy
        self.now = 0
        self.heard: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.running: RunSteps | None = None

    def tell(self, event: AnyEvent) -> None:
        self.now += 1
        self._do(self.machine.handle(event, self.now))
        if self.machine.wake_at is not None and self.machine.wake_at <= self.now:
            self._do(self.machine.handle(Woke(), self.now))

    def step(self) -> None:
        """Let the run in progress end."""
        assert self.running is not None
        action, self.running = self.running, None
        ended = self.engine.run(action, self._hear)
        self.tell(StepsDone(ended.run, ended.steps, ended.stopped))
        assert self.engine.ledger.num_free == self.machine.pool.num_free
        next_run: RunSteps | None = self.running
        if not next_run or not any(chunk.num_cached for chunk in next_run.chunks):  # those are taken when it runs
            assert self.engine.ledger.num_held == self.machine.num_used_blocks

    def _hear(self, tokens: Sequence[TokenOut]) -> None:
        for out in tokens:
            self.heard.setdefault(out.request, []).append(out.token)

    def _do(self, actions: Sequence[AnyAction]) -> None:
        for action in actions:
            match action:
                case RunSteps():
                    self.running = action
                case Cut():
                    self.engine.cut(action.run)
                case Preempt():
                    self.engine.preempt(action.requests)
                case Forget():
                    self.engine.forget(action.requests)
                case Send(_, Progressed(_, _, finished, _)):
                    self.finished.update(finished)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # output tokens
        st.integers(0, 2),  # which prefix it shares
        st.integers(0, 3),  # runs that end before the next arrives
        st.booleans(),  # cancelled, after one more run
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.integers(13, 30), st.booleans(), st.integers(4, 16))
def test_engine_and_machine_agree_on_every_block_under_pressure(
    requests: list[tuple[int, int, int, int, bool]], num_blocks: int, prefix_cache: bool, budget: int
) -> None:
    pair = Pair(num_blocks, Vllm(max_num_seqs=4, max_num_batched_tokens=budget, prefix_cache=prefix_cache))
    kept = {}
    for id, (prompt, output, prefix, runs, cancelled) in enumerate(requests):
        tokens = tuple(range(100 * prefix, 100 * prefix + prompt))
        hashes = block_hashes(tokens, 4, b"secret") if prefix_cache else ()
        pair.engine.add(Job(id, tokens, Sampling(max_tokens=output, seed=id), block_hashes=hashes))
        pair.tell(Submitted(Request(id, pair.now, prompt, output, block_hashes=hashes)))
        for _ in range(runs):
            if pair.running is not None:
                pair.step()
        if cancelled and id not in pair.finished:
            pair.tell(Cancelled(id))
        else:
            kept[id] = output
    while pair.running is not None:
        pair.step()
    assert pair.finished == set(range(len(requests)))
    assert pair.engine.ledger.num_held == 0
    for id, output in kept.items():
        assert pair.heard[id] == spoken(id, output)
