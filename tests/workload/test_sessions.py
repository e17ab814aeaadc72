from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError
from squall.workload.build import build
from squall.workload.sessions import recorded_contents
from squall.workload.spec import (
    AllAtOnce,
    ClosedLoop,
    FixedArrivals,
    FixedLength,
    OfferedRequest,
    PoissonArrivals,
    SessionsWorkload,
    UniformLength,
)
from squall.workload.turns import Turns

SECOND = 1_000_000_000


def sessions(**changes: Any) -> list[OfferedRequest]:
    fields: dict[str, Any] = {
        "arrivals": PoissonArrivals(2.0),
        "turns": UniformLength(1, 6),
        "prompt": UniformLength(1, 100),
        "output": UniformLength(1, 60),
        "num_sessions": 50,
        "think_s": 3.0,
    }
    return build(SessionsWorkload(**{**fields, **changes}), 5, Path(), 16, honours_after=True)


def by_session(requests: list[OfferedRequest]) -> dict[int, list[OfferedRequest]]:
    found: dict[int, list[OfferedRequest]] = {}
    for request in requests:
        found.setdefault(request.session, []).append(request)
    return found


def test_every_turn_repeats_the_conversation_and_adds_to_it() -> None:
    for turns in by_session(sessions(system_tokens=70)).values():
        assert turns[0].num_prompt_tokens > 70
        for before, turn in pairwise(turns):
            assert turn.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            said = before.block_hashes + before.output_hashes
            assert turn.block_hashes[: len(said)] == said
            assert len(said) == (before.num_prompt_tokens + before.num_output_tokens) // 16


def test_conversations_share_what_the_system_says_and_nothing_else() -> None:
    first_turns = [turns[0] for turns in by_session(sessions(system_tokens=70, prompt=FixedLength(60))).values()]
    assert len({turn.block_hashes[:4] for turn in first_turns}) == 1
    counts = Counter(hash for turn in first_turns for hash in turn.block_hashes[4:])
    assert set(counts.values()) == {1}


def test_a_turn_waits_for_the_turn_before_it_and_ids_are_in_order_of_the_earliest_arrival() -> None:
    requests = sessions()
    assert [request.id for request in requests] == list(range(len(requests)))
    assert all(before.arrived_at <= after.arrived_at for before, after in pairwise(requests))
    for turns in by_session(requests).values():
        assert (turns[0].after, turns[0].think) == (-1, 0)
        for before, turn in pairwise(turns):
            assert turn.after == before.id < turn.id
            assert turn.arrived_at == before.arrived_at + turn.think


def test_without_waiting_turns_come_at_the_same_instants_and_nobody_is_released() -> None:
    waiting, open_loop = sessions(), sessions(waits=False)
    assert [request.arrived_at for request in waiting] == [request.arrived_at for request in open_loop]
    assert {(request.after, request.think) for request in open_loop} == {(-1, 0)}


def test_thinking_takes_as_long_as_was_asked_for() -> None:
    for cv in (0.5, 1.0, 2.0):
        thinks = np.array([request.think for request in sessions(num_sessions=4000, think_cv=cv) if request.after >= 0]) / SECOND
        assert thinks.mean() == pytest.approx(3.0, rel=0.06)
        assert thinks.std() / thinks.mean() == pytest.approx(cv, rel=0.06)
    assert {request.think for request in sessions(think_cv=0.0) if request.after >= 0} == {3 * SECOND}


def test_other_arrivals_and_more_of_them_leave_the_conversations_as_they_are() -> None:
    def shape(requests: list[OfferedRequest]) -> list[list[tuple[int, int, int]]]:
        found = by_session(requests)
        return [[(t.num_prompt_tokens, t.num_output_tokens, t.think) for t in found[number]] for number in sorted(found)]

    assert shape(sessions()) == shape(sessions(arrivals=FixedArrivals(9.0)))
    assert shape(sessions()) == shape(sessions(num_sessions=80))[:50]


def test_a_conversation_ends_before_it_outgrows_the_context() -> None:
    limited, free = sessions(max_context=300), sessions()
    assert max(request.num_prompt_tokens + request.num_output_tokens for request in limited) <= 300
    for number, turns in by_session(limited).items():
        whole = by_session(free)[number]
        assert [turn.num_prompt_tokens for turn in turns] == [turn.num_prompt_tokens for turn in whole[: len(turns)]]
        if len(whole) > len(turns):
            assert whole[len(turns)].num_prompt_tokens + whole[len(turns)].num_output_tokens > 300
    with pytest.raises(ConfigError, match=r"a first turn of 500 \+ 20 tokens exceeds max_context = 100"):
        sessions(prompt=FixedLength(500), output=FixedLength(20), max_context=100)


def test_in_a_closed_loop_a_conversation_begins_when_an_earlier_one_has_ended() -> None:
    requests = sessions(arrivals=ClosedLoop(4, think_s=7.0), num_sessions=12)
    found = by_session(requests)
    assert len(found) == 12
    for number in range(1, 13):
        first = found[number][0]
        if number <= 4:
            assert (first.arrived_at, first.after) == (0, -1)
        else:
            assert first.after == found[number - 4][-1].id
            assert first.think == 7 * SECOND


def test_conversations_that_wait_are_refused_by_those_who_cannot_wait() -> None:
    workload = SessionsWorkload(AllAtOnce(), FixedLength(2), FixedLength(5), FixedLength(5), num_sessions=2)
    with pytest.raises(
        ConfigError, match=r"waits is true \(use false\), but no replay can play requests that wait for answers yet"
    ):
        build(workload, 0, Path())
    single = SessionsWorkload(AllAtOnce(), FixedLength(1), FixedLength(5), FixedLength(5), num_sessions=2)
    assert len(build(single, 0, Path())) == 2


def test_more_conversation_than_memory_holds_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"workload: 40,000,000 turns are too many, more than 20,000,000; lower num_sessions or"
    ):
        sessions(turns=FixedLength(20_000_000), num_sessions=2)
    with pytest.raises(ConfigError, match=r"workload: conversations of 268,\d+,\d+ blocks are too much; set max_context"):
        sessions(turns=FixedLength(1), prompt=FixedLength(1 << 32), num_sessions=1)


def test_no_conversation_within_the_duration_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no conversation begins within duration_s = 0.0001"):
        sessions(arrivals=PoissonArrivals(0.1), num_sessions=None, duration_s=0.0001)


@given(data=st.data(), count=st.integers(1, 12))
def test_recorded_contents_agree_with_texts_that_are_written_out(data: st.DataObject, count: int) -> None:
    """The oracle: every turn's text as a list of (who said it, at which place)."""
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(count)]
    prompts = [data.draw(st.integers(1, 30)) for _ in range(count)]
    outputs = [data.draw(st.integers(1, 10)) for _ in range(count)]
    shared = [data.draw(st.integers(0, prompts[max(0, parent)])) for parent in parents]
    for turns in (Turns([1] * count, parents, shared), Turns([1] * count, parents)):
        texts: list[list[tuple[int, int]]] = []
        for row, parent in enumerate(parents):
            history = [] if parent < 0 else texts[parent][: shared[row] if turns.shared else None][: prompts[row]]
            texts.append(history + [(row, place) for place in range(len(history), prompts[row] + outputs[row])])
        contents = recorded_contents(turns, prompts, outputs)
        for text, content in zip(texts, contents, strict=True):
            spelt: list[tuple[int, int]] = []
            for end, owner in content:
                spelt += [(owner, place) for place in range(len(spelt), end)]
            assert spelt == text
