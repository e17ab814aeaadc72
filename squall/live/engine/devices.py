"""Where memory can lie that other processes map: CUDA devices by CUDA IPC, and ordinary memory that is treated as a device's.

The thin layer below `device_memory`: allocate, lend, map, copy, and in which order. Knows no regions, no weights and no KV. CUDA
is asked for these few things through its runtime library, which PyTorch has loaded, as PyTorch's own allocator is in the way of
lending: it cuts allocations up, may map them piecewise (`expandable_segments`), and keeps lent memory in limbo until each
borrower has said that it is done, which one that was killed never says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from squall.errors import ConfigError, PeerLost
from squall.live.transport.device import Lent, Unreachable
from squall.live.transport.memory import SharedMemory

_BORN = secrets.token_hex(8)


def process() -> str:
    """Which one we are: what was lent comes back to it where two replicas share one. (A number alone repeats in containers.)"""
    return f"{_BORN} {os.getpid()}"


class Room(Protocol):
    """Memory on a device: our own, or a peer's that is mapped.

    Attributes:
        tensor: all of it, uint8. lent: None where other processes cannot map it.
    """

    @property
    def tensor(self) -> Tensor: ...

    @property
    def lent(self) -> Lent | None: ...

    def close(self) -> None:
        """Unmap what is a peer's; nothing is left of `tensor`. Idempotent."""
        ...


class Device(Protocol):
    """One device. From any thread."""

    kind: str

    def allocate(self, num_bytes: int) -> Room:
        """Zeros, for as long as the room is kept. Raises ConfigError where there are not so many."""
        ...

    def open(self, lent: Lent) -> Room:
        """Map what another process has lent. Raises Unreachable."""
        ...

    def copy(self, room: Room, offset: int, into: Tensor) -> None:
        """As many bytes of a mapped room as `into`, of this device, takes. Within `ordered`. Raises PeerLost."""
        ...

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """What is done within comes after all that was computed before, beside what is computed meanwhile, and ends with it."""
        ...


def device_of(device: torch.device) -> Device | None:
    """None for a CPU: its memory is the host's, which peers read without any of this."""
    return Cuda(device) if device.type == "cuda" else None


def device_for(lent: Lent, device: torch.device) -> Device:
    """What maps it."""
    return Cuda(device) if lent.kind == Cuda.kind else Shared()


def beside(device: torch.device, rank: int) -> torch.device:
    """Of rank `rank` of a replica whose rank 0 is on `device`: the GPU after rank 0's, and so on."""
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


# -- ordinary memory


class Shared:
    """Ordinary memory that is reached as a device's is: mapped by its handle, or else by way of the host. See `Device`.

    Runs all that is above this layer where there is no GPU.

    Args:
        lends: whether other processes can map it.
    """

    kind = "memory"

    def __init__(self, lends: bool = True) -> None:
        self._lends = lends

    def allocate(self, num_bytes: int) -> Room:
        memory = SharedMemory(num_bytes)
        lent = None
        if self._lends and memory.fd is not None:
            handle = f"{os.fstat(memory.fd).st_ino} /proc/{os.getpid()}/fd/{memory.fd}".encode()
            lent = Lent(self.kind, "memory", process(), handle, num_bytes)
        return _SharedRoom(memory, lent)

    def open(self, lent: Lent) -> Room:
        """The descriptor's number may be another file's by now: the inode tells."""
        inode, _, path = lent.handle.decode().partition(" ")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror}") from None
        if os.fstat(fd).st_ino != int(inode):
            os.close(fd)
            raise Unreachable(f"{path}: is other memory by now")
        return _SharedRoom(SharedMemory.of(fd), lent)

    def copy(self, room: Room, offset: int, into: Tensor) -> None:
        into.copy_(room.tensor[offset : offset + len(into)])

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _SharedRoom:
    def __init__(self, memory: SharedMemory, lent: Lent | None) -> None:
        self.lent = lent
        self._memory: SharedMemory | None = memory
        self.tensor = torch.frombuffer(memory.view, dtype=torch.uint8)

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._memory = None


# -- CUDA


_GRANULE = 2 << 20
"""CUDA cuts smaller allocations out of blocks of this size, and lends whole blocks only."""

_LAZY_PEER_ACCESS = 1
_DEFAULT = 4
"""cudaMemcpyDefault: the addresses tell where both sides lie."""


class Cuda:
    """One CUDA device. See `Device`.

    Args:
        device: as PyTorch numbers it in this process; the current one where it has no number.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._runtime = _Runtime.loaded()

    @property
    def name(self) -> str:
        """The same in all processes, whatever CUDA_VISIBLE_DEVICES makes of its number."""
        properties: Any = torch.cuda.get_device_properties(self._index)
        return f"GPU-{properties.uuid}"

    def allocate(self, num_bytes: int) -> Room:
        device = torch.device("cuda", self._index)
        if self._runtime is None:
            return _Plain(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        with torch.cuda.device(self._index):
            try:
                address = self._runtime.malloc(-(-num_bytes // _GRANULE) * _GRANULE)
            except _Failed as error:
                raise ConfigError(f"{self.name} has no room for {num_bytes / 1e9:.2f} GB: {error}") from None
            try:
                lent = Lent(self.kind, self.name, process(), self._runtime.handle(address), num_bytes)
            except _Failed:
                lent = None
        room = _CudaRoom(self._runtime, self._index, address, num_bytes, lent, ours=True)
        with self.ordered():  # whom it is lent to computes in an order of its own
            room.tensor.zero_()
        return room

    def open(self, lent: Lent) -> Room:
        """On our device, also what lies on one that this process does not see; CUDA joins the two where hardware does."""
        if lent.process == process():
            raise Unreachable("CUDA maps no memory of the process itself")
        if self._runtime is None:
            raise Unreachable("PyTorch has loaded no CUDA runtime library")
        with torch.cuda.device(self._index):
            try:
                address = self._runtime.open(lent.handle)
            except _Failed as error:
                raise Unreachable(f"{self.name} cannot map memory of {lent.device}: {error}") from None
        return _CudaRoom(self._runtime, self._index, address, lent.num_bytes, lent, ours=False)

    def copy(self, room: Room, offset: int, into: Tensor) -> None:
        assert isinstance(room, _CudaRoom)
        assert self._runtime is not None
        stream = torch.cuda.current_stream(self._index).cuda_stream
        try:
            self._runtime.copy(into.data_ptr(), room.address + offset, len(into), stream)
        except _Failed as error:
            raise PeerLost(f"{self.name} cannot read memory that it has mapped: {error}") from None

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """A stream of its own, beside the default one, in which all threads compute."""
        with torch.cuda.device(self._index):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream())
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()


class _Plain:
    """Memory of PyTorch's own, which nobody maps."""

    lent = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def close(self) -> None:
        """It is ours."""


class _CudaRoom:
    """Memory by its address, of which PyTorch sees a tensor."""

    def __init__(
        self, runtime: _Runtime, index: int, address: int, num_bytes: int, lent: Lent | None, *, ours: bool
    ) -> None:  # fmt: skip
        self.address = address
        self.lent = lent
        self._runtime = runtime
        self._index = index
        self._num_bytes = num_bytes
        self._ours = ours

    @property
    def tensor(self) -> Tensor:
        """Keeps the room for as long as it lives."""
        return torch.as_tensor(_Array(self, self.address, self._num_bytes), device=torch.device("cuda", self._index))

    def close(self) -> None:
        if not self._ours and self.address:
            self._release(self._runtime.close)

    def _release(self, call: Any) -> None:
        address, self.address = self.address, 0
        with contextlib.suppress(Exception), torch.cuda.device(self._index):  # at the interpreter's end CUDA may be gone
            call(address)

    def __del__(self) -> None:
        if self.address:
            self._release(self._runtime.free if self._ours else self._runtime.close)


class _Array:
    """Says to PyTorch where bytes lie; see CUDA Array Interface, version 2."""

    def __init__(self, room: _CudaRoom, address: int, num_bytes: int) -> None:
        self.room = room
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


class _Failed(Exception):
    """What CUDA said."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Runtime:
    """The few calls of libcudart that are needed, each about the thread's current device, without the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaGetErrorString.argtypes = [ctypes.c_int]
        library.cudaMalloc.argtypes = [ctypes.POINTER(pointer), size]
        library.cudaFree.argtypes = [pointer]
        library.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
        library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
        library.cudaIpcCloseMemHandle.argtypes = [pointer]
        library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]

    @classmethod
    def loaded(cls) -> _Runtime | None:
        """Of PyTorch's build; by its plain name the system finds the one that is loaded already. None where there is none."""
        if torch.version.cuda is None:
            return None
        torch.cuda.init()  # type: ignore[no-untyped-call]
        try:
            return cls(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}"))
        except OSError:
            return None

    def malloc(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self._check(self._library.cudaMalloc(ctypes.byref(address), num_bytes))
        return address.value or 0

    def free(self, address: int) -> None:
        self._check(self._library.cudaFree(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._check(self._library.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The same handle may be open several times: CUDA counts."""
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._check(self._library.cudaIpcOpenMemHandle(ctypes.byref(address), given, _LAZY_PEER_ACCESS))
        return address.value or 0

    def close(self, address: int) -> None:
        self._check(self._library.cudaIpcCloseMemHandle(address))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._check(self._library.cudaMemcpyAsync(to, source, num_bytes, _DEFAULT, stream))

    def _check(self, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # or PyTorch would take it for its own
            raise _Failed(self._library.cudaGetErrorString(code).decode())
