"""Which rows of a trace are turns of one conversation. Knows columns and rows, no time and no content."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from squall.workload.formats import CHARS_PER_TOKEN, Format


class Turns(Struct, frozen=True):
    """Of each row; empty lists where a trace has no conversations.

    Attributes:
        sessions: a number from 1 on for each conversation, 0 for a row that is in none.
        parents: the row that is the turn before, -1 where there is none. It may have arrived later (agents work side by side).
        shared: with how many of the parent's prompt tokens the row's prompt begins; as many as surely are in characters that are
            the same. Empty: with all of them and the answer.
    """

    sessions: list[int] = []
    parents: list[int] = []
    shared: list[int] = []


def find_turns(form: Format, columns: Mapping[str, list[Any]], note: Callable[[str], None]) -> Turns:
    """The conversations in the optional columns of a trace, which is in order of arrival."""
    if any(columns.get(form.chat, ())):
        return _by_chat(columns[form.chat], columns.get(form.parent) or [None] * len(columns[form.chat]), note)
    if form.session and all(name in columns for name in form.session):
        names = list(zip(*(map(_word, columns[name]) for name in form.session), strict=True))
        if any(map(any, names)):
            turns = _by_session(names, columns.get(form.turn, []))
            shared = [chars // CHARS_PER_TOKEN for chars in columns.get(form.shared, ())]
            return Turns(turns.sessions, turns.parents, shared)
    return Turns()


def _by_chat(chats: list[Any], parents: list[Any], note: Callable[[str], None]) -> Turns:
    """Every row names itself and the turn before it; -1 and nothing mean that there is none."""
    rows: dict[str, int] = {}
    turns = Turns([], [])
    lost = num_sessions = 0
    for row, (chat, parent) in enumerate(zip(chats, parents, strict=True)):
        before = -1 if parent in (None, "", -1, "-1") else rows.get(str(parent), -2)
        if before < 0:
            lost += before == -2
            num_sessions += 1
        turns.parents.append(max(-1, before))
        turns.sessions.append(turns.sessions[before] if before >= 0 else num_sessions)
        if chat is not None:
            rows[str(chat)] = row
    if lost:
        note(f"{lost} rows follow a turn that is not above them; they count as first turns")
    return turns


def _word(name: Any) -> str:
    return "" if name is None else str(name)


def _by_session(names: list[tuple[str, ...]], order: list[Any]) -> Turns:
    """Rows name their session. The turn before is the one numbered one less, or without numbers the row before."""
    numbers: dict[tuple[Any, ...], int] = {}
    sessions = [
        numbers.setdefault(name, len(numbers) + 1) if any(part not in (None, "") for part in name) else 0 for name in names
    ]
    if order and all(str(turn).isdecimal() for turn in order):
        rows = {(session, int(turn)): row for row, (session, turn) in enumerate(zip(sessions, order, strict=True))}
        parents = [rows.get((session, int(turn) - 1), -1) for session, turn in zip(sessions, order, strict=True)]
    else:
        last: dict[int, int] = {}
        parents = []
        for row, session in enumerate(sessions):
            parents.append(last.get(session, -1))
            last[session] = row
    return Turns(sessions, [parent if session else -1 for parent, session in zip(parents, sessions, strict=True)])
