"""Is this machine fit to serve? One line a question: ok, warn or fail, and what to do. Knows no configuration and no fleet.

The check of the model runs a forward pass and compares with logits that were stored when the built-in engine had been found
to agree with `transformers`.
"""

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from squall.cores import num_cores
from squall.errors import ConfigError, ModelError, SquallError, TransferFailed
from squall.extras import INSTALL, install, missing

if TYPE_CHECKING:
    from squall.live.engine.devices import Device
    from squall.live.transport.endpoint import Endpoint

Verdict = Literal["ok", "warn", "fail"]

MIN_OPEN_FILES = 4096
"""A head with a thousand streams and their workers' sockets."""

MIN_SHARED_BYTES = 1 << 30
"""Docker's default of 64 MB holds no model."""

TOLERANCE = 1e-2
"""Of a logit: processors round differently, another model differs by whole numbers."""

BORROW_S = 120.0
"""Importing torch from a cold, slow disk is the longest part."""

SYS = Path("/sys")


class Finding(Struct, frozen=True):
    """What one check found; `fix` says what to do, where there is something."""

    subject: str
    verdict: Verdict
    said: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.verdict:<4}  {self.subject}: {self.said}" + (f"; {self.fix}" if self.fix else "")


def examine() -> Iterator[Finding]:
    """All checks, one after the other, as they are done. A check that breaks is itself a finding."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("installation", "fail", "it simulates and replays, and cannot serve: torch is not there", INSTALL)
        return
    for check in (
        _device,
        _collectives,
        _rdma,
        _peer_access,
        _lending,
        _transport,
        _shared_memory,
        _open_files,
        _container,
        _model,
    ):
        try:
            yield from check()
        except ModuleNotFoundError as error:
            fix = "report this" if missing(error) is None else INSTALL
            yield Finding(check.__name__.strip("_").replace("_", " "), "fail", f"{error.name} is not installed", fix)
        except Exception as error:
            yield Finding(check.__name__.strip("_").replace("_", " "), "fail", f"{type(error).__name__}: {error}", "report this")


def _device() -> Iterator[Finding]:
    import torch

    build = f"PyTorch {torch.__version__}"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("device", "ok", f"{len(names)} GPU(s): {', '.join(sorted(set(names)))} ({build})")
        return
    cores = num_cores()
    if shutil.which("nvidia-smi") is not None:
        fix = "install a CUDA build of it, and see that the driver is loaded (nvidia-smi)"
        yield Finding("device", "warn", f"there is an NVIDIA driver, but {build} sees no GPU", fix)
    else:
        yield Finding("device", "ok", f"CPU, {cores} core(s) ({build})")


def _model() -> Iterator[Finding]:
    """The embedded model, if it is here: the five likeliest tokens after a prompt, and their logits."""
    from squall.live.models import find

    try:
        folder = find("smollm2")
    except ModelError as error:
        yield Finding("forward pass", "warn", "not checked: the embedded model is not here", str(error).rpartition("; ")[2])
        return
    stored = json.loads(Path(__file__).with_name("doctor.json").read_text(encoding="utf-8"))
    found = logits(folder, stored["tokens"])
    worst = max(abs(found[token] - value) for token, value in stored["logits"])
    best = max(range(len(found)), key=found.__getitem__)
    if worst > TOLERANCE or best != stored["logits"][0][0]:
        fix = "delete the model and pull it again, and see `squall doctor` once more with $CXX set to a missing compiler"
        yield Finding("forward pass", "fail", f"logits differ by {worst:.3g} from those stored", fix)
    else:
        yield Finding("forward pass", "ok", f"{folder.name}: logits within {worst:.1g} of those stored")


def logits(folder: Path, tokens: list[int]) -> list[float]:
    """Scores of what follows `tokens`, by the built-in engine on this machine's best device."""
    import torch

    from squall.core.actions import Chunk
    from squall.live.engine.interface import Job, Sampling
    from squall.live.engine.tokenizer import ByteTokenizer
    from squall.live.engine.torch_engine import TorchEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = TorchEngine(folder, ByteTokenizer(), num_blocks=8, device=device, dtype="fp32")
    engine.load()
    engine.add(Job(0, tuple(tokens), Sampling(max_tokens=1)))
    step = engine.prepare([Chunk(0, 0, len(tokens), 0, True)])
    return engine.scores(step, engine.run_layers(step, 0, engine.num_layers))[0]


def _collectives() -> Iterator[Finding]:
    import torch
    from torch import distributed

    if not distributed.is_available():
        yield Finding(
            "collectives", "warn", "this PyTorch has no torch.distributed: no tensor parallelism", "install another build"
        )
        return
    here = [
        name for name, there in (("gloo", distributed.is_gloo_available()), ("NCCL", distributed.is_nccl_available())) if there
    ]
    missing = torch.cuda.device_count() > 1 and "NCCL" not in here
    fix = "install a CUDA build of PyTorch: several GPUs are slow without NCCL" if missing else ""
    yield Finding("collectives", "warn" if missing else "ok", ", ".join(here) or "none", fix)


def _rdma() -> Iterator[Finding]:
    """Network cards that write into another machine's memory, and which GPU each is near to."""
    devices = sorted(path.name for path in (SYS / "class/infiniband").glob("*"))
    if not devices:
        yield Finding("RDMA", "ok", "no such network card: weights and KV travel over TCP and shared memory")
        return
    import torch

    numa = {name: _number(SYS / f"class/infiniband/{name}/device/numa_node") for name in devices}
    gpus = {index: _gpu_node(index) for index in range(torch.cuda.device_count())}
    near = [f"GPU {gpu}: {', '.join(name for name in devices if numa[name] == node) or 'none'}" for gpu, node in gpus.items()]
    far = [gpu for gpu, node in gpus.items() if node not in numa.values()]
    if far:
        yield Finding("RDMA", "warn", f"GPU {far[0]} has no card on its NUMA node ({'; '.join(near)})", "use another slot or GPU")
    else:
        yield Finding("RDMA", "ok", f"{', '.join(devices)} ({'; '.join(near) or 'no GPU'})")
    if gpus and not (SYS / "module/nvidia_peermem").exists():
        yield Finding("GPU memory over RDMA", "warn", "nvidia_peermem is not loaded", "modprobe nvidia_peermem, or use DMA-BUF")


def _peer_access() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        yield Finding("peer access", "ok", f"{count} GPU(s): nothing to copy between")
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if closed:
        yield Finding(
            "peer access",
            "warn",
            f"not between GPU {closed[0][0]} and {closed[0][1]}",
            "disable ACS in the BIOS, or accept copies through the host",
        )
    else:
        yield Finding("peer access", "ok", f"all {count} GPUs reach each other")


def _lending() -> Iterator[Finding]:
    """Whether a second process, on our last GPU, maps memory of the first one: how weights and KV go from GPU to GPU."""
    import torch

    from squall.live.engine.devices import Cuda

    count = torch.cuda.device_count()
    if not count:
        yield Finding("CUDA IPC", "ok", "no GPU: nothing to map")
        return
    first, last = torch.device("cuda", 0), torch.device("cuda", count - 1)
    reason = why_not_lent(Cuda(first), str(last))
    if reason is None:
        yield Finding("CUDA IPC", "ok", f"a process on {last} maps memory of {first}: weights and KV go from GPU to GPU")
    else:
        fix = "run workers in one container, or with --ipc=host; WSL has none. Bytes go by host memory, KV of replica.tp > 1 not"
        yield Finding("CUDA IPC", "warn", reason, fix)


def why_not_lent(device: "Device", borrower: str) -> str | None:
    """Why another process, on PyTorch's device `borrower`, cannot read what is on `device`; None where it can."""
    from squall.live.engine.device_memory import TorchMemory

    memory = TorchMemory.allocate([device], 1 << 20)
    if not memory.lent:
        return "memory of the GPU cannot be lent to another process"
    memory.put([(0, 1 << 20)], [memoryview(bytearray(os.urandom(1 << 20)))])
    command = [sys.executable, "-m", "squall.live.engine.borrow", borrower]
    said = subprocess.run(command, input=msgspec.msgpack.encode(memory.lent[0]), capture_output=True, timeout=BORROW_S)
    if said.returncode:
        return (said.stderr.decode(errors="replace").strip().splitlines() or ["the second process failed"])[-1]
    return None if int(said.stdout) == memory.digest([(0, 1 << 20)]) else "bytes arrive changed"


def _transport() -> Iterator[Finding]:
    """A megabyte from one peer to another, both here, over each backend."""
    from squall.live.transport.endpoint import Endpoint

    yield from _transported(Endpoint("giver", "doctor"), Endpoint("taker", "doctor", listen=None))
    if importlib.util.find_spec("nixl") is None:
        yield Finding("transport (nixl)", "ok", f"not installed; a network with RDMA needs it ({install('nixl')})")
        return
    try:
        peers = [Endpoint(name, "doctor", local=False, nixl=True) for name in ("giver", "taker")]
    except ConfigError as error:
        yield Finding("transport (nixl)", "warn", str(error), 'serve.transport = "auto" and "tcp" do without')
        return
    yield from _transported(*peers)


def _transported(giver: "Endpoint", taker: "Endpoint") -> Iterator[Finding]:
    from squall.live.transport.memory import SharedMemory
    from squall.live.transport.region import Region

    memory = SharedMemory(1 << 20)
    memory.view[:] = os.urandom(1 << 20)
    giver.register(Region("probe", memory))
    try:
        for address in giver.addresses:
            kind = address.partition(":")[0]
            into = Region("copy", memoryview(bytearray(1 << 20)))
            try:
                link = taker.connect(address)
                link.open("probe")
                link.read("probe", [(0, len(into.memory))], into)
                link.close()
            except (SquallError, TransferFailed) as error:
                yield Finding(f"transport ({kind})", "fail", str(error), "is a firewall or a sandbox in the way?")
                continue
            right = into.memory == memory.view
            yield Finding(
                f"transport ({kind})",
                "ok" if right else "fail",
                "works" if right else "bytes arrive changed",
                "" if right else "test the memory",
            )
    finally:
        taker.close()
        giver.close()


def _shared_memory() -> Iterator[Finding]:
    from squall.live.transport.segment import FOLDER, HostCopies

    if not FOLDER.is_dir():
        yield Finding("shared memory", "warn", f"{FOLDER} is not there: no host copies of weights", "mount a tmpfs there")
        return
    removed = HostCopies().sweep()
    stat = os.statvfs(FOLDER)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    swept = f", {len(removed)} host copies removed whose time was over" if removed else ""
    said = f"{free / 1e9:.1f} of {size / 1e9:.1f} GB free in {FOLDER}{swept}"
    small = free < MIN_SHARED_BYTES
    yield Finding(
        "shared memory", "warn" if small else "ok", said, "run the container with --shm-size=16g or --ipc=host" if small else ""
    )


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < MIN_OPEN_FILES
    fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536} (LimitNOFILE= of a service, --ulimit nofile= of a container)"
    yield Finding("open files", "warn" if few else "ok", f"at most {soft}", fix if few else "")


def _container() -> Iterator[Finding]:
    """What a container's limits forbid: locking memory for RDMA, and seeing the cores that it may not use."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = any((SYS / "class/infiniband").glob("*"))
    if rdma and locked not in (-1, resource.RLIM_INFINITY):
        yield Finding(
            "locked memory",
            "warn",
            f"at most {locked} bytes, and RDMA locks all it registers",
            "--ulimit memlock=-1, --cap-add IPC_LOCK",
        )
    quota = _cpu_quota()
    cores = num_cores()
    if quota is not None and quota < cores:
        said = f"{quota:g} cores may be used, but {cores} are seen: threads will be stopped in the middle of their work"
        yield Finding(
            "container", "warn", said, f"--cpuset-cpus with {max(1, int(quota))} cores instead of --cpus, and fewer workers"
        )
    else:
        yield Finding("container", "ok", "in one" if _contained() else "none")


def _cpu_quota() -> float | None:
    """Cores, of the control group that we are in; None for no limit."""
    try:
        quota, period = (SYS / "fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _contained() -> bool:
    return any(Path(sign).exists() for sign in ("/.dockerenv", "/run/.containerenv")) or "KUBERNETES_SERVICE_HOST" in os.environ


def _gpu_node(index: int) -> int:
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return _number(SYS / f"bus/pci/devices/{bus}/numa_node")


def _number(path: Path) -> int:
    """-1 where the system does not say, as it does itself for "no node"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
