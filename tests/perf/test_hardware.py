import csv
from pathlib import Path

import pytest

from squall.errors import ConfigError
from squall.perf.hardware import GPUS, measure_cpu, resolve_gpu

ROW = {
    "a100-40g": "A100-40GB", "a100-80g": "A100-80GB", "h100-sxm": "H100-80GB", "h200": "H200-141GB", "b200": "B200-180GB",
    "l4": "L4-24GB", "l40s": "L40S-48GB", "a10g": "A10G-24GB", "t4": "T4-16GB", "rtx4090": "RTX4090-24GB",
    "mi300x": "MI300X-192GB",
}  # fmt: skip


@pytest.mark.shared
def test_the_catalogue_restates_the_collected_facts(shared: Path) -> None:
    facts: dict[str, dict[str, str]] = {}
    for row in csv.DictReader((shared / "data" / "gpus.csv").read_text().splitlines()):
        facts.setdefault(row["gpu"], row)
    for name, their_name in ROW.items():
        gpu, fact = GPUS[name], facts[their_name]
        assert gpu.flops == pytest.approx(float(fact["bf16_dense_tflops"]) * 1e12, rel=1e-3), name
        assert gpu.bandwidth == float(fact["mem_bw_gbs"]) * 1e9, name
        assert (gpu.fp8_flops is None) == (not fact["fp8_dense_tflops"]), name
        assert 0.85 * float(fact["mem_gb"]) < gpu.memory_bytes / 1e9 < 1.08 * float(fact["mem_gb"]), name


def test_names_forgive_case_and_the_usual_abbreviations() -> None:
    assert resolve_gpu("H100") is resolve_gpu("h100-sxm") is resolve_gpu("H100_SXM") is GPUS["h100-sxm"]
    assert resolve_gpu("a100") is GPUS["a100-80g"]


def test_an_unknown_gpu_lists_close_matches() -> None:
    with pytest.raises(ConfigError, match=r"cluster.gpu 'h1000' is unknown: did you mean h100"):
        resolve_gpu("h1000")


def test_this_machine_is_measured_as_some_plausible_cpu() -> None:
    cpu = measure_cpu()
    assert cpu.kind == "cpu"
    assert 1e9 < cpu.flops < 1e13
    assert 5e8 < cpu.bandwidth < 1e12
    assert cpu.memory_bytes > 1 << 28


def test_every_row_has_a_price_with_its_date_and_a_source() -> None:
    for gpu in GPUS.values():
        assert gpu.usd_per_hour > 0
        assert any(year in gpu.price for year in ("2025", "2026"))
        assert gpu.source
