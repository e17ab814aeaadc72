"""What the doctor finds, on this machine and on worse ones."""

import importlib.util
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from squall.errors import ModelError
from squall.extras import INSTALL
from squall.live import doctor, models
from squall.live.doctor import Finding, examine
from squall.live.engine.devices import Room, Shared
from tests.live.transport.conftest import NIXL


def find(subject: str) -> Finding:
    return next(finding for finding in examine() if finding.subject == subject)


def test_here_nothing_fails_and_every_warning_says_what_to_do() -> None:
    findings = list(examine())
    assert [finding.line() for finding in findings if finding.verdict == "fail"] == []
    assert all(finding.fix for finding in findings if finding.verdict != "ok")
    assert {"device", "collectives", "RDMA", "peer access", "CUDA IPC", "transport (tcp)", "shared memory", "open files"} <= {
        finding.subject for finding in findings
    }


def test_a_finding_is_one_line() -> None:
    assert Finding("open files", "warn", "at most 64", "ulimit -n 4096").line() == "warn  open files: at most 64; ulimit -n 4096"


def test_other_weights_are_noticed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find", lambda name: tiny_model)
    monkeypatch.setattr(doctor, "logits", lambda folder, tokens: [0.0] * 50_000)
    finding = find("forward pass")
    assert (finding.verdict, finding.fix != "") == ("fail", True)
    assert finding.said == "logits differ by 17.4 from those stored"


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return tmp_path


def test_without_the_model_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Path:
        raise ModelError("model 'smollm2' is not in the store (x); run `squall model pull smollm2`")

    monkeypatch.setattr(models, "find", none)
    assert find("forward pass") == Finding(
        "forward pass", "warn", "not checked: the embedded model is not here", "run `squall model pull smollm2`"
    )


@pytest.mark.parametrize(("limit", "verdict"), [(256, "warn"), (65536, "ok")])
def test_the_limit_on_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, verdict: str) -> None:
    original: Callable[[int], tuple[int, int]] = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, 65536) if what == resource.RLIMIT_NOFILE else original(what))
    assert find("open files").verdict == verdict


def test_cards_for_rdma_are_found_and_a_memory_limit_is_in_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, node in (("mlx5_0", 0), ("mlx5_1", 1)):
        (tmp_path / f"class/infiniband/{name}/device").mkdir(parents=True)
        (tmp_path / f"class/infiniband/{name}/device/numa_node").write_text(f"{node}\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(doctor, "SYS", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    assert "mlx5_0, mlx5_1" in find("RDMA").said
    assert find("locked memory").fix == "--ulimit memlock=-1, --cap-add IPC_LOCK"
    assert find("container").said.startswith("0.5 cores may be used")


@NIXL
def test_nixl_moves_bytes_where_it_is_installed() -> None:
    assert find("transport (nixl)").said == "works"


def test_without_nixl_it_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else there(name))
    finding = find("transport (nixl)")
    assert (finding.verdict, finding.fix) == ("ok", "")
    assert finding.said.startswith("not installed; a network with RDMA needs it (pip install 'squall[nixl]'")


def test_nixl_that_is_installed_and_cannot_be_used_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there("json" if name == "nixl" else name))
    monkeypatch.setitem(sys.modules, "nixl", None)  # what an import then raises is that it is not there
    finding = find("transport (nixl)")
    assert finding.verdict == "warn"
    assert finding.said.startswith("NIXL is not installed here")


def test_a_second_process_maps_what_is_lent_and_says_why_where_it_cannot() -> None:
    assert doctor.why_not_lent(Shared(), "cpu") is None
    assert doctor.why_not_lent(Shared(lends=False), "cpu") == "memory of the GPU cannot be lent to another process"


def test_what_cannot_be_mapped_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Shared):
        """Lends what is not there, as between two containers."""

        def allocate(self, num_bytes: int) -> Room:
            room = super().allocate(num_bytes)
            assert room.lent is not None
            room.lent = replace(room.lent, handle=b"1 /proc/none/fd/3")  # type: ignore[misc]
            return room

    assert doctor.why_not_lent(Elsewhere(), "cpu") == "cannot be mapped: /proc/none/fd/3: No such file or directory"


@pytest.mark.gpu
def test_a_second_process_maps_memory_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert find("CUDA IPC").verdict == "ok"


def test_a_package_that_is_missing_is_a_finding_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> tuple[int, int]:
        raise ModuleNotFoundError("No module named 'xxhash'", name="xxhash")

    monkeypatch.setattr(doctor, "_open_files", lacking)
    [found] = [finding for finding in examine() if finding.verdict == "fail"]
    assert found.line().endswith(f"xxhash is not installed; {INSTALL}")


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[int, int]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_open_files", broken)
    assert any(finding.verdict == "fail" and "RuntimeError: no such thing" in finding.said for finding in examine())
