"""A journal loses at most the point in hand, and does not mix what was measured of different things."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from squall.errors import ProfileError
from squall.twin.profiling.journal import Journal, Row, Setup

SETUP = Setup("m", 10, "here", "fp32", "fp32", 16, "eager")
ROWS = [Row("gemm", {"dtype": "fp32", "rows": 8, "columns": 8, "tokens": n}, 0.5 * n) for n in (1, 2, 4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal(tmp_path / "j", SETUP) as journal:
        for row in ROWS:
            journal.add(row)
    return journal.path


def rows(path: Path) -> list[Row]:
    with Journal(path, SETUP) as journal:
        return journal.rows


def test_what_was_kept_is_there_again(path: Path) -> None:
    with Journal(path, SETUP) as journal:
        assert journal.rows == ROWS
        journal.add(ROWS[0])
    assert rows(path) == [*ROWS, ROWS[0]]
    journal.remove()
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_was_cut_short_is_the_only_one_lost(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, SETUP) as journal:
        assert journal.rows == ROWS[:2]
        journal.add(ROWS[2])
    assert rows(path) == ROWS


def test_a_killed_process_leaves_all_that_it_had_finished(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from squall.twin.profiling.journal import *
journal = Journal(Path({str(tmp_path / "j")!r}), Setup("m", 10, "here", "fp32", "fp32", 16, "eager"))
for n in range(1, 1000):
    journal.add(Row("gemm", {{"tokens": n}}, 1.0))
    print(n, flush=True)
    time.sleep(0.001)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split()]
    kept = [row.at["tokens"] for row in rows(tmp_path / "j")]
    assert kept in (told, [*told, told[-1] + 1])


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("num_params", 11), ("dtype", "bf16"), ("mode", "graphs")])
def test_another_setup_is_refused(path: Path, field: str, value: object) -> None:
    with pytest.raises(ProfileError, match=rf"was begun with {field} .*, not {value!r}; choose another --out"):
        Journal(path, replace(SETUP, **{field: value}))


def test_a_damaged_line_is_named(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = msgspec.json.encode({"operator": "gemm"}) + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ProfileError, match=r"line 3 is damaged .*; remove the file to begin again"):
        Journal(path, SETUP)
