"""The tables of an installed aiconfigurator-core: found by the package's metadata, the newest of each."""

from pathlib import Path

import polars as pl
import pytest

from squall.errors import ProfileError
from squall.perf.hardware import resolve_gpu
from squall.perf.tables.installed import installed_tables

H100 = resolve_gpu("h100-sxm")


def gemm_table(path: Path, latency: float) -> None:
    path.parent.mkdir(parents=True)
    pl.DataFrame({"gemm_dtype": "bfloat16", "m": [16, 4096], "n": 8192, "k": 4096, "latency": [0.03, latency]}).write_parquet(
        path
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something installed under that name, with two versions of one table."""
    info = tmp_path / "aiconfigurator_core-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 0.12.0\n")
    root = tmp_path / "aiconfigurator_core" / "systems" / "data"
    gemm_table(root / "h100_sxm" / "gemm" / "vllm" / "0.9.0" / "gemm_perf.parquet", 0.9)
    gemm_table(root / "h100_sxm" / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet", 0.4)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


@pytest.mark.usefixtures("package")
def test_the_newest_version_of_a_table_is_read() -> None:
    profile = installed_tables(H100)
    assert profile.header.source == "NVIDIA aiconfigurator (Apache-2.0), aiconfigurator-core 0.12.0, h100_sxm"
    estimate = profile.source().gemm(4096, 4096, 8192, "bf16")
    assert estimate is not None
    assert estimate.seconds == pytest.approx(4e-4)


@pytest.mark.usefixtures("package")
def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ProfileError, match="no measured tables of t4; it has h100-sxm"):
        installed_tables(resolve_gpu("t4"))
    with pytest.raises(ProfileError, match="no tables of sglang on h100-sxm; it has vllm"):
        installed_tables(H100, "sglang")
    with pytest.raises(ProfileError, match="engine 'tgi' has no measured tables; use one of vllm, sglang, trtllm"):
        installed_tables(H100, "tgi")
