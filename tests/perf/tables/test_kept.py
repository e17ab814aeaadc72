"""Tables kept between commands: read once, checked once, and never in the way."""

from pathlib import Path

import polars as pl
import pytest

from squall.perf.tables.kept import folder_of, kept_source
from squall.perf.tables.profile import VERSION, Header, OperatorProfile, gather


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = tmp_path / "table.csv"
    table.write_text("a,b\n")
    return folder_of([table], "h100-sxm", "vllm")


def profile() -> OperatorProfile:
    gemm = pl.DataFrame(
        {"dtype": "bf16", "rows": 4096, "columns": 8192, "tokens": [16, 4096], "seconds": [3e-5, 4e-4], "row": [2, 3]}
    )
    header = Header(VERSION, "h100-sxm", "vllm 0.24", "a test", step_s=3e-4)
    return gather(header, {"gemm": gemm}, {"gemm": "t"})


def never() -> OperatorProfile:
    raise AssertionError("made again")


def seconds(folder: Path, make: object = never) -> tuple[float, str, float | None]:
    source = kept_source(folder, make)  # type: ignore[arg-type]
    estimate = source.gemm(1024, 4096, 8192, "bf16")
    assert estimate is not None
    return estimate.seconds, source.name, source.step_s


def test_the_second_reading_makes_nothing_and_says_the_same(folder: Path) -> None:
    made = seconds(folder, profile)
    assert seconds(folder) == made
    assert made[1:] == ("measured (h100-sxm, vllm 0.24)", 3e-4)
    assert kept_source(folder, never).moe(1, 1, 1, 8, 2, "bf16", 1, 1) is None


def test_changed_files_are_kept_elsewhere(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert folder_of([table], "h100-sxm", "vllm") == folder
    assert folder_of([table], "h100-sxm", "sglang") != folder
    table.write_text("a,b\n1,2\n")
    assert folder_of([table], "h100-sxm", "vllm") != folder


def test_what_cannot_be_read_is_made_again(folder: Path) -> None:
    made = seconds(folder, profile)
    (folder / "gemm.parquet").write_bytes(b"broken")
    assert seconds(folder, profile) == made


def test_where_nothing_can_be_written_everything_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = folder_of([tmp_path / "file"])
    assert seconds(folder, profile)[0] == seconds(folder, profile)[0]
    assert not folder.exists()
