"""How long collectives take between processes of this machine: gloo between CPUs, NCCL between GPUs. Knows no model.

Every member is a process of its own, as a worker is, and does what it is told until its pipe is closed. A collective takes as
long as its slowest member.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from squall.errors import ProfileError
from squall.twin.profiling.lines import Line, Place
from squall.twin.profiling.questions import sizes

VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SEND = "send"

FIRST_BYTES, LAST_BYTES = 1 << 10, 64 << 20
ROUNDS = 5
ENOUGH_S = 0.02
"""Of one round."""

_PATIENCE_S = 60.0


def lines(world: int) -> list[Line]:
    """What there is to measure between so many; handing on is between two, whoever takes part besides."""
    bytes_ = sizes(FIRST_BYTES, LAST_BYTES)
    found = [Line(verb, {"gpus": world}, "bytes", bytes_) for verb in VERBS]
    if world == 2:
        found.append(Line(SEND, {"gpus": 1}, "bytes", bytes_))
    return found


class Members:
    """Processes that are joined. `seconds` asks them for one collective."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def seconds(self, verb: str, num_bytes: int) -> float:
        """The median of some rounds, each as long as its slowest member takes. Raises ProfileError where a member fails."""
        once = self._round(verb, num_bytes, 2)
        count = max(1, min(1000, int(ENOUGH_S / max(once, 1e-6))))
        return median(self._round(verb, num_bytes, count) for _ in range(ROUNDS))

    def at(self, verb: str, at: Place) -> float:
        """`seconds` at a row's columns."""
        return self.seconds(verb, int(at["bytes"]))

    def _round(self, verb: str, num_bytes: int, count: int) -> float:
        try:
            for pipe in self._pipes:
                pipe.send((verb, num_bytes, count))
            return max(self._answer(pipe) for pipe in self._pipes)
        except (EOFError, OSError):
            raise ProfileError("a process died while collectives were measured; what it printed says why") from None

    def _answer(self, pipe: Connection) -> float:
        if not pipe.poll(_PATIENCE_S):
            raise ProfileError(f"a collective has not ended after {_PATIENCE_S:.0f} s; is its network blocked?")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise ProfileError(f"collectives cannot be measured: {answer}")
        return float(answer)


@contextmanager
def joined(world: int, device: str) -> Iterator[Members]:
    """So many processes that are joined while the block runs. `device` is "cpu" or "cuda": one GPU each.

    Raises ProfileError where they cannot be joined.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="squall-") as folder:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                meeting = str(Path(folder) / "meeting")
                process = context.Process(target=_member, args=(rank, world, meeting, device, theirs), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            members = Members(pipes)
            members.seconds(VERBS[0], FIRST_BYTES)  # when this is done, all have come
            yield members
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _member(rank: int, world: int, meeting: str, device: str, pipe: Connection) -> None:
    """In a process of its own: join, then time what is asked for until nobody asks any more."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
        while True:
            verb, num_bytes, count = pipe.recv()
            pipe.send(_timed(_collective(verb, num_bytes, rank, world, device), count, device))
    except EOFError:
        return
    except Exception as error:  # whatever a backend throws, the parent says it in one line
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _timed(call: Callable[[], Any], count: int, device: str) -> float:
    import torch.distributed as dist

    from squall.twin.profiling.timing import burst

    dist.barrier()
    call()
    if device == "cuda":
        return burst(call, count)
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _collective(verb: str, num_bytes: int, rank: int, world: int, device: str) -> Callable[[], Any]:
    """The call; bytes as `OperatorSource` counts them."""
    import torch
    import torch.distributed as dist

    share = max(1, num_bytes // world)
    whole = torch.zeros(share * world, dtype=torch.uint8, device=device)
    part = torch.zeros(share, dtype=torch.uint8, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    if verb == "all_reduce":
        values = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
        return lambda: dist.all_reduce(values)
    if verb == "all_gather":
        return lambda: gather(whole, part)
    if verb == "reduce_scatter":
        summed, all_of_it = (torch.zeros(max(1, share // 4) * n, dtype=torch.float32, device=device) for n in (1, world))
        return lambda: scatter(summed, all_of_it)
    if verb == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole)
    return (lambda: dist.send(whole, 1)) if rank == 0 else (lambda: dist.recv(whole, 0))
