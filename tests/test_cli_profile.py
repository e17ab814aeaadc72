"""`squall profile import`, beside `squall profile`, which measures as ever."""

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from squall.cli import app
from squall.errors import ConfigError, ProfileError
from squall.perf.tables.profile import load


def run(*words: str) -> str:
    return CliRunner().invoke(app, list(words), catch_exceptions=False).output


def table(folder: Path, **columns: object) -> Path:
    gemm = {"device": "NVIDIA H100", "gemm_dtype": "bfloat16", "m": [16, 4096], "n": 8192, "k": 4096, "latency": [0.03, 0.4]}
    pl.DataFrame(gemm | columns).write_parquet(folder / "gemm_perf.parquet")
    return folder


def test_tables_become_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "h100.parquet"
    words = ("--format", "aiconfigurator", str(table(tmp_path)), "--gpu", "h100", "-o", str(out))
    said = run("profile", "import", *words)
    assert "gemm: 2 points" in said
    assert f"--set latency.kind=measured --set latency.path={out}" in said
    assert load(out).header.gpu == "h100-sxm"
    with pytest.raises(ConfigError, match="exists already"):
        run("profile", "import", *words)


def test_a_wrong_table_leaves_no_profile(tmp_path: Path) -> None:
    out = tmp_path / "h100.parquet"
    with pytest.raises(ProfileError, match=r"row 2: the time of gemm is -1\.0"):
        run("profile", "import", "--format", "aiconfigurator", str(table(tmp_path, latency=[0.4, -1e3])), "-o", str(out))
    assert not out.exists()


def test_whatever_else_follows_is_for_measuring(tmp_path: Path) -> None:
    assert "How long to measure" in run("profile", "--help")
    with pytest.raises(ConfigError, match="no such configuration file"):
        run("profile", str(tmp_path / "none.toml"))
