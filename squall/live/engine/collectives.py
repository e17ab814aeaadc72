"""What the ranks of one tensor-parallel replica compute together: sums and gathers, each with a deadline. Knows no model.

gloo on a CPU, NCCL on GPUs. A group is an object of its own, not the process's default one, so that a process may be in several.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the stubs leave it out

HOST = "127.0.0.1"
"""The ranks of a replica share a machine."""


class Group:
    """One rank's end. All ranks make the same calls in the same order.

    Args:
        rank, size: of this one, and how many there are.
        port: where rank 0 listens while they find each other; see `meeting`.
        device: of the tensors.
        timeout_s: after which a call has failed: it raises on a CPU, and ends the process on a GPU.
        store: rank 0's own, where the others meet it.

    Raises RuntimeError where they do not all come within the time; so does every call.
    """

    def __init__(self, rank: int, size: int, port: int, device: torch.device, timeout_s: float, store: Any = None) -> None:
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            store = TCPStore(HOST, port, None, False, timeout)
        self._ranks: Any = _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, timeout)

    def sum(self, x: Tensor) -> Tensor:
        """`x` of all ranks, added up, in the place of ours."""
        self._ranks.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """At rank 0 the columns of all ranks side by side, [rows, sum of columns]; at the others their own.

        Args:
            x: [rows, columns]; columns may differ, but only the last rank may have fewer.
            width: columns of all together.
        """
        share = -(-width // self.size)
        own = x if x.shape[1] == share else torch.nn.functional.pad(x, (0, share - x.shape[1]))
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._ranks.gather([parts] if parts else [], [own.contiguous()], options).wait()
        return torch.cat(parts, dim=1)[:, :width] if parts else x


def meeting(timeout_s: float) -> Any:
    """Where the ranks of a group find each other: a store at rank 0, on a free `port`."""
    return TCPStore(HOST, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = distributed.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]  # builds without CUDA have none
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)
