import csv
from pathlib import Path

import pytest

from squall.errors import ConfigError
from squall.perf.hardware import GPUS, measure_cpu, resolve_gpu

ROW = {
    "a100-40g": ("A100-40GB", "SXM4"), "a100-80g": ("A100-80GB", "SXM4"), "a100-80g-pcie": ("A100-80GB", "PCIe"),
    "h100-sxm": ("H100-80GB", "SXM5"), "h100-pcie": ("H100-80GB", "PCIe"), "h200": ("H200-141GB", "SXM5"),
    "b200": ("B200-180GB", "SXM6"), "b300": ("B300-268GB", "SXM"), "gb200": ("GB200", "NVL72"), "l4": ("L4-24GB", "PCIe"),
    "l40s": ("L40S-48GB", "PCIe"), "a10g": ("A10G-24GB", "PCIe"), "a40": ("A40-48GB", "PCIe"), "t4": ("T4-16GB", "PCIe"),
    "rtx4090": ("RTX4090-24GB", "PCIe"), "rtx-pro-6000": ("RTX PRO 6000 (server)", "PCIe"), "mi300x": ("MI300X-192GB", "OAM"),
    "mi325x": ("MI325X-256GB", "OAM"),
}  # fmt: skip


@pytest.mark.shared
def test_the_catalogue_restates_the_collected_facts_of_every_gpu(shared: Path) -> None:
    rows = csv.DictReader((shared / "data" / "gpus.csv").read_text().splitlines())
    facts = {(row["gpu"], row["form"]): row for row in rows}
    assert set(ROW.values()) == set(facts)
    for name, theirs in ROW.items():
        gpu, fact = GPUS[name], facts[theirs]
        assert gpu.flops == pytest.approx(float(fact["bf16_dense_tflops"]) * 1e12, rel=1e-3), name
        assert gpu.bandwidth == float(fact["mem_bw_gbs"]) * 1e9, name
        for ours, key in (
            (gpu.fp8_flops, "fp8_dense_tflops"),
            (gpu.int8_flops, "int8_dense_tops"),
            (gpu.fp4_flops, "fp4_dense_tflops"),
        ):
            assert ours == (pytest.approx(float(fact[key]) * 1e12, rel=1e-3) if fact[key] else None), (name, key)
        assert 0.85 * float(fact["mem_gb"]) < gpu.memory_bytes / 1e9 < 1.08 * float(fact["mem_gb"]), name
        assert gpu.power_w == float(fact["tdp_w"]), name
        if fact["pcie_gbs_unidir"]:
            assert gpu.pcie_bandwidth == float(fact["pcie_gbs_unidir"]) * 1e9, name


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


def own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_overrides_any_figure_of_a_known_gpu(tmp_path: Path) -> None:
    gpu = resolve_gpu(own(tmp_path, 'base = "h100"\nmemory_gib = 94\nusd_per_hour = 1.5\nprice = "our contract, 2026"\n'))
    assert gpu.name == "mine"
    assert (gpu.memory_bytes, gpu.usd_per_hour, gpu.price) == (94 << 30, 1.5, "our contract, 2026")
    assert gpu.bandwidth == GPUS["h100-sxm"].bandwidth


def test_a_file_can_describe_a_gpu_that_nobody_knows(tmp_path: Path) -> None:
    gpu = resolve_gpu(own(tmp_path, 'name = "x1"\nbf16_tflops = 100\nmemory_gib = 32\nbandwidth_gbs = 900\npcie_gbs = 64\n'))
    assert (gpu.name, gpu.flops, gpu.fp8_flops, gpu.link_bandwidth) == ("x1", 1e14, None, 64e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gib = 32", r"bf16_tflops is missing; add it, or base = "),
        ('base = "h1000"', r"cluster.gpu 'h1000' is unknown: did you mean h100"),
        ('base = "other.toml"', r"base is 'other.toml'; it must be the name of a GPU"),
        ('base = "l4"\nmemory_gb = 3', r"mine.toml: memory_gb is unknown; did you mean memory_gib"),
        ('base = "l4"\nmemory_gib = 0', r"memory_gib is 0; it must be a number above 0"),
        ('base = "l4"\nmemory_gib = "24"', r"memory_gib is '24'; it must be a number"),
        ('base = "l4"\nbandwidth_gbs = nan', r"bandwidth_gbs is nan"),
        ('base = "l4"\nname = 4', r"name is 4; it must be a text"),
        ("base = ", r"mine.toml: cannot be read"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_gpu(own(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster.gpu none.toml: no such file"):
        resolve_gpu("none.toml")


def test_where_no_name_is_close_some_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^cluster.gpu 'zzz' is unknown: known are cpu, (\S+, ){5}\.\.\.$"):
        resolve_gpu("zzz")
