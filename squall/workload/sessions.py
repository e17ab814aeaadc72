"""Conversations: their turns, what the turns share, and who waits for whom. Knows no clock, only when a turn could come first."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from squall.core.types import SECOND, BlockHash, Nanos
from squall.errors import ConfigError
from squall.workload.generators import draw_arrivals, draw_lengths
from squall.workload.limits import MOST_HASHES, MOST_REQUESTS
from squall.workload.prefixes import Segments, grown, segment_hashes
from squall.workload.spec import ClosedLoop, OfferedRequest, SessionsWorkload
from squall.workload.streams import stream
from squall.workload.turns import Turns


class _Turn(Struct):
    """One request before it has its id. `before` is the turn whose end releases it."""

    arrived_at: Nanos
    session: int
    prompt: int
    output: int
    before: "_Turn | None"
    think: Nanos
    id: int = -1


def draw_sessions(workload: SessionsWorkload, seed: int, base_dir: Path, block_size: int) -> list[OfferedRequest]:
    """The turns of all conversations, in order of `arrived_at`. Raises ConfigError where none is left."""
    arrivals = workload.arrivals
    if isinstance(arrivals, ClosedLoop):
        if workload.duration_s is not None:
            raise ConfigError("workload.duration_s means nothing in a closed loop, which ends after num_sessions; leave it out")
        starts = [0] * (workload.num_sessions or 0)
    else:
        starts = draw_arrivals(arrivals, seed, workload.num_sessions, workload.duration_s, base_dir)
    lasts: list[_Turn] = []
    turns: list[_Turn] = []
    for session, drawn in enumerate(_draw_turns(workload, seed, base_dir, len(starts))):
        first = starts[session]
        before = None
        think = 0
        if isinstance(arrivals, ClosedLoop) and session >= arrivals.concurrency:
            before = lasts[session - arrivals.concurrency]
            think = round(arrivals.think_s * SECOND)
            first = before.arrived_at + think
        chain = _chain(workload, session, drawn, first, before, think)
        turns += chain
        lasts.append(chain[-1])
    if not turns:
        raise ConfigError(f"workload: no conversation begins within duration_s = {workload.duration_s}; raise it or the rate")
    turns.sort(key=lambda turn: turn.arrived_at)  # stable: turns of one conversation stay in order
    for id, turn in enumerate(turns):
        turn.id = id
    if (blocks := sum((turn.prompt + turn.output) // block_size for turn in turns)) > MOST_HASHES:
        raise ConfigError(
            f"workload: conversations of {blocks:,} blocks are too much; set max_context, or have fewer or shorter turns"
        )
    texts = [_text(workload, last, block_size) for last in lasts]
    return [_offered(turn, texts[turn.session - 1], block_size) for turn in turns]


def _draw_turns(workload: SessionsWorkload, seed: int, base_dir: Path, count: int) -> list[list[tuple[int, int, Nanos]]]:
    """Of each conversation: new prompt tokens, output tokens and the time to think before each turn."""
    numbers = draw_lengths(workload.turns, seed, "turns", count, base_dir)
    total = sum(numbers)
    if total > MOST_REQUESTS:
        raise ConfigError(f"workload: {total:,} turns are too many, more than {MOST_REQUESTS:,}; lower num_sessions or turns")
    prompts = draw_lengths(workload.prompt, seed, "prompt", total, base_dir)
    outputs = draw_lengths(workload.output, seed, "output", total, base_dir)
    thinks = _draw_thinks(workload, seed, total)
    drawn = []
    first = 0
    for number in numbers:
        end = first + number
        drawn.append(list(zip(prompts[first:end], outputs[first:end], thinks[first:end], strict=True)))
        first = end
    return drawn


def _draw_thinks(workload: SessionsWorkload, seed: int, count: int) -> list[Nanos]:
    mean, squared = workload.think_s * SECOND, workload.think_cv**2
    if not mean or not squared:
        return [round(mean)] * count
    drawn: list[Nanos] = np.rint(stream(seed, "think").standard_gamma(1 / squared, count) * (squared * mean)).astype(int).tolist()
    return drawn


def _chain(
    workload: SessionsWorkload,
    session: int,
    drawn: Sequence[tuple[int, int, Nanos]],
    first: Nanos,
    before: _Turn | None,
    think: Nanos,
) -> list[_Turn]:
    """The turns of one conversation, until the next would not fit."""
    chain: list[_Turn] = []
    history = workload.system_tokens
    at = first
    for new, output, next_think in drawn:
        if chain:
            before = chain[-1] if workload.waits else None
            think = next_think
            at += think
        if workload.max_context is not None and history + new + output > workload.max_context:
            if not chain:
                raise ConfigError(
                    f"workload: a first turn of {history + new} + {output} tokens exceeds max_context = {workload.max_context}"
                )
            break
        chain.append(_Turn(at, session + 1, history + new, output, before, think if before is not None else 0))
        history += new + output
    return chain


def _text(workload: SessionsWorkload, last: _Turn, block_size: int) -> tuple[BlockHash, ...]:
    """All that is said in a conversation; every turn is its beginning. Owner 0 says what all conversations begin with."""
    end = last.prompt + last.output
    content = [(workload.system_tokens, 0)] if workload.system_tokens else []
    return segment_hashes(grown(content, workload.system_tokens, end, last.session), block_size)


def _offered(turn: _Turn, text: tuple[BlockHash, ...], block_size: int) -> OfferedRequest:
    asked, answered = turn.prompt // block_size, (turn.prompt + turn.output) // block_size
    return OfferedRequest(
        turn.id,
        turn.arrived_at,
        turn.prompt,
        turn.output,
        block_hashes=text[:asked],
        session=turn.session,
        after=-1 if turn.before is None else turn.before.id,
        think=turn.think,
        output_hashes=text[asked:answered],
    )


def recorded_contents(turns: Turns, prompts: Sequence[int], outputs: Sequence[int]) -> list[Segments]:
    """What each turn of a trace says: what it shares with the turn before it, and then its own words, answer included.

    Empty for rows that are in no conversation.
    """
    contents: list[Segments] = [[] for _ in prompts]
    for row, session in enumerate(turns.sessions):
        line = []
        while session and not contents[row]:
            line.append(row)
            if turns.parents[row] < 0:
                break
            row = turns.parents[row]
        for turn in reversed(line):
            parent = turns.parents[turn]
            end = prompts[turn] + outputs[turn]
            if parent < 0:
                contents[turn] = [(end, turn)]
                continue
            shared = turns.shared[turn] if turns.shared else prompts[parent] + outputs[parent]
            contents[turn] = grown(contents[parent], min(shared, prompts[turn]), end, turn)
    return contents


def waiting_turns(
    requests: Sequence[OfferedRequest], turns: Turns, recorded_at: Sequence[Nanos], tbt_s: float
) -> list[OfferedRequest]:
    """The requests of a trace, where a turn follows the answer to the one before it.

    Between the two lies the recorded gap, less `tbt_s` for every token of the answer. A turn that arrived before the one that it
    follows is a first turn: whoever sent it did not wait.
    """
    first_at = [request.arrived_at for request in requests]
    thinks = [0] * len(requests)
    before = [-1] * len(requests)
    for row, parent in zip(range(len(requests)), turns.parents, strict=False):
        if 0 <= parent < row:
            answer = round(tbt_s * SECOND * requests[parent].num_output_tokens)
            thinks[row] = max(0, recorded_at[row] - recorded_at[parent] - answer)
            first_at[row] = first_at[parent] + thinks[row]
            before[row] = parent
    order = sorted(range(len(requests)), key=first_at.__getitem__)
    ids = {row: id for id, row in enumerate(order)}
    return [
        structs.replace(requests[row], id=id, arrived_at=first_at[row], after=ids.get(before[row], -1), think=thinks[row])
        for id, row in enumerate(order)
    ]
