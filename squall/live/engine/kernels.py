"""Native kernels for a decode step on the CPU (kernels.cpp), compiled once for this machine. Knows no model.

They are optional: without a compiler, or where anything about them fails, the caller computes the same with PyTorch. The
compiled file lies in the user's cache, named by everything that went into it.
"""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from squall.live.home import home

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Not -ffast-math: linked into a shared object it switches denormal numbers off for the whole process.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_MAX_ROWS = 15  # PyTorch's own product is faster from 16 rows on, and up to twice as slow with 9 to 15 as with 16
_log = logging.getLogger(__name__)


class Kernels:
    """The compiled functions, over float32 CPU tensors without gaps in their last dimensions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._linear = library.squall_linear
        self._linear.argtypes = [pointer] * 4 + [number] * 3
        self._rope_store = library.squall_rope_store
        self._rope_store.argtypes = [pointer] * 6 + [number] * 4
        self._attend = library.squall_attend
        self._attend.argtypes = [pointer] * 7 + [number] * 8 + [ctypes.c_float]
        for function in (self._linear, self._rope_store, self._attend):
            function.restype = None

    @staticmethod
    def suits(x: Tensor, weight: Tensor) -> bool:
        """Whether `linear` is worth its while for this product."""
        return x.shape[0] <= _MAX_ROWS and weight.shape[0] % 4 == 0 and x.is_contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [m, k] times weight [n, k] transposed, plus bias [n]; see `suits`."""
        m, k = x.shape
        n = weight.shape[0]
        y = x.new_empty((m, n))
        offset = None if bias is None else bias.data_ptr()
        self._linear(y.data_ptr(), x.data_ptr(), weight.data_ptr(), offset, m, n, k)
        return y

    def rope_store(self, qkv: Tensor, cosine: Tensor, sine: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Rotate q and k of qkv [tokens, heads + 2 kv_heads, dim] in place; write k and v to `slots` [tokens] of the pool."""
        tokens, heads, dim = qkv.shape
        kv_heads = keys.shape[2]
        pointers = (tensor.data_ptr() for tensor in (qkv, cosine, sine, slots, keys, values))
        self._rope_store(*pointers, tokens, heads - 2 * kv_heads, kv_heads, dim)

    def attend(
        self, qkv: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scores: Tensor, window: int
    ) -> Tensor:
        """Attention of one token a sequence: [sequences, heads, dim].

        Args:
            keys, values: [num_blocks, block_size, kv_heads, dim].
            tables: [sequences, any width] block numbers, int32; lengths: [sequences], int32, the new token counted.
            scores: scratch [heads, longest length + block_size + 8].
            window: tokens to look back, 0 for all.
        """
        sequences, all_heads, dim = qkv.shape
        block_size, kv_heads = keys.shape[1], keys.shape[2]
        heads = all_heads - 2 * kv_heads
        out = qkv.new_empty((sequences, heads, dim))
        pointers = (tensor.data_ptr() for tensor in (out, qkv, keys, values, tables, lengths, scores))
        sizes = (sequences, heads, kv_heads, dim, block_size, tables.stride(0), scores.shape[1], window)
        self._attend(*pointers, *sizes, dim**-0.5)
        return out


def load_kernels() -> Kernels | None:
    """The kernels, compiled if they are not yet; None where they cannot be had, with the reason in the log."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        _log.info("no C++ compiler: the engine runs on PyTorch alone, which is slower with long contexts")
        return None
    try:
        path = _compiled(compiler)
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip().splitlines()[:1] if isinstance(error, subprocess.CalledProcessError) else [str(error)]
        _log.warning("native kernels are off: %s", detail[0] if detail else error)
        return None


def _compiled(compiler: str) -> Path:
    folder = home() / "kernels"
    target = folder / f"{_fingerprint(compiler)}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        built = Path(scratch) / "kernels.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        built.replace(target)  # two processes may do this at once; either file serves
    return target


def _fingerprint(compiler: str) -> str:
    """Of source, compiler, flags and processor: a home directory may be shared by machines of different kinds."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    digest = sha256(_SOURCE.read_bytes())
    for part in (compiler, *_FLAGS, platform.machine(), features):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]
