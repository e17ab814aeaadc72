"""The page of lifecycles is drawn from the tables and is up to date."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from squall.core.lifecycle import REPLICA, REQUEST, TRANSFER
from squall.report.diagrams import WITH_A_PROCESS, main, page

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md"


def test_the_committed_page_is_up_to_date(tmp_path: Path) -> None:
    main([str(tmp_path / "page.md")])
    assert COMMITTED.read_text(encoding="utf-8") == (tmp_path / "page.md").read_text(encoding="utf-8"), "run `make docs`"


def test_every_transition_of_every_table_is_drawn() -> None:
    tables: list[Mapping[Any, Mapping[Any, Any]]] = [REPLICA, TRANSFER, REQUEST]
    drawings = page().split("```mermaid")[1:]
    for table, drawing in zip(tables, drawings, strict=True):
        drawn = set()
        for before, after, labels in re.findall(r"(\w+) --> (\w+): (.+)", drawing):
            sources = [str(phase) for phase in WITH_A_PROCESS] if before == "process" else [before]
            drawn |= {(source, label, after) for source in sources for label in labels.split(", ")}
        assert drawn == {
            (str(before), on if isinstance(on, str) else on.__name__, str(after))
            for before, row in table.items()
            for on, after in row.items()
        }
