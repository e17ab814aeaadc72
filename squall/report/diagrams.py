"""Draws docs/lifecycle.md from the tables of core/lifecycle.py: `python -m squall.report.diagrams` (or `make docs`).

Knows Mermaid and Markdown. Does not know what a phase means.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from squall.core.lifecycle import REPLICA, REQUEST, TRANSFER, Phase, RequestPhase, TransferPhase

DEFAULT_PATH = Path("docs/lifecycle.md")

INTRODUCTION = """\
# Lifecycles

What may happen to a replica, to its weights on their way, and to a request: drawn from the tables in `squall/core/lifecycle.py`
by `make docs`. Whatever is not drawn cannot happen: a machine that is told of it raises `IllegalTransition` with the object's
story.

Role (prefill, decode, both), phase and transfer are three separate things. A replica that is loading, with some layers in and a
partner to run the others, works already; that is not a phase of its own.
"""

SECTIONS = (
    (
        "Replica",
        """\
`Launched`, `Withdrawn` and `Revived` are the controller's decisions; all others are events. In every phase in which there is a
process it can die (`ReplicaLost`) and it can be stopped (`ReplicaStopped`): these two arrows leave from the frame. A replica that
was asked to stop keeps its phase until it has. `Emptied` changes nothing where it crossed with a revival or a loss.
""",
    ),
    ("Transfer of weights", "One load of one replica's weights, from whatever source, along whatever path.\n"),
    (
        "Request",
        """\
As the router sees it. `first token`, `preempted` and `finished` are the parts of a `Progressed` event. A request whose replica
dies is queued again, in front; one that has been through that more often than it may is rejected.
""",
    ),
)

WITH_A_PROCESS = [phase for phase in Phase if phase not in (Phase.OFF, Phase.FAILED)]

Table = Mapping[Any, Mapping[Any, StrEnum]]


def page() -> str:
    """The whole page."""
    drawings = (_replica(), _machine(TRANSFER, TransferPhase.ASKED), _machine(REQUEST, RequestPhase.QUEUED))
    parts = [INTRODUCTION]
    for (title, text), drawing in zip(SECTIONS, drawings, strict=True):
        parts.append(f"## {title}\n\n{text}\n```mermaid\nstateDiagram-v2\n{drawing}\n```\n")
    return "\n".join(parts)


def _replica() -> str:
    """What every phase with a process has in common leaves from the frame around these phases."""
    common = set.intersection(*(set(REPLICA[phase].items()) for phase in WITH_A_PROCESS))
    inside: dict[Any, Mapping[Any, StrEnum]] = {}
    outside: dict[Any, Mapping[Any, StrEnum]] = {}
    for phase, row in REPLICA.items():
        framed = phase in WITH_A_PROCESS
        inside[phase] = {on: after for on, after in row.items() if framed and after in WITH_A_PROCESS}
        outside[phase] = {on: after for on, after in row.items() if not framed or after not in WITH_A_PROCESS}
        if framed:
            outside[phase] = {on: after for on, after in outside[phase].items() if (on, after) not in common}
    lines = [
        "    [*] --> off",
        "    state process {",
        *(f"    {line}" for line in _arrows(inside)),
        "    }",
        *_arrows(outside),
        *sorted(f"    process --> {after}: {_label(on)}" for on, after in common),
    ]
    return "\n".join(lines)


def _machine(table: Table, first: StrEnum) -> str:
    finals = [f"    {phase} --> [*]" for phase, row in table.items() if not row]
    return "\n".join([f"    [*] --> {first}", *_arrows(table), *finals])


def _arrows(table: Table) -> list[str]:
    """One arrow from a phase to another, with all that leads along it."""
    lines = []
    for phase, row in table.items():
        for after in dict.fromkeys(row.values()):
            labels = ", ".join(_label(on) for on, target in row.items() if target is after)
            lines.append(f"    {phase} --> {after}: {labels}")
    return lines


def _label(on: Any) -> str:
    return on if isinstance(on, str) else str(on.__name__)


def main(arguments: Sequence[str]) -> None:
    """Write the page to the path given, or to its place in a checkout."""
    path = Path(arguments[0]) if arguments else DEFAULT_PATH
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
