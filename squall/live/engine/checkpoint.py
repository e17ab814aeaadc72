"""The safetensors files of a checkpoint in Hugging Face layout. Knows files and names, not what the tensors are for.

Nothing is trusted: a file that is cut short, a tensor that is missing, too many or of another shape than config.json says is
one line that names it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from squall.errors import ModelError
from squall.live.engine.jsonfile import read_json

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # old exports keep what can be computed
_TIED_HEAD = "lm_head.weight"


class Stored(Struct, frozen=True):
    """A tensor's place: `num_bytes` at `offset` of the file at `path`, row after row, without gaps."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """What a folder holds. Use it as a context: files stay open in between.

    Raises ModelError: names the file, and the tensor with both shapes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}
        self._stored: dict[Path, dict[str, Stored]] = {}

    def __enter__(self) -> "Checkpoint":
        with ExitStack() as stack:
            for path in _files(self.folder):
                file = stack.enter_context(_open(path))
                self._files |= dict.fromkeys(file.keys(), (path, file))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool = False) -> None:
        """That exactly these tensors are there, and none of a type that is not read.

        Args:
            tied: a head may be there and is not wanted.
        """
        _check_names(self.folder, self._files, shapes, frozenset({_TIED_HEAD} if tied else ()))
        for name, shape in shapes.items():
            _check_tensor(self.folder, self._files[name][1], name, shape)

    def stored(self, name: str) -> Stored:
        """Where a tensor lies, which `check` has seen."""
        path, _ = self._files[name]
        if path not in self._stored:
            self._stored[path] = _places(path)
        return self._stored[path][name]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor, or values of a vector, mapped: read as they are used."""
        part: Tensor = self._files[name][1].get_slice(name)[first:last]
        return part


def load_checkpoint(folder: Path, views: Mapping[str, Tensor], ignored: Iterable[str] = ()) -> None:
    """Copy every tensor of the checkpoint into the view of its name, converting number types.

    Args:
        views: where each tensor goes; their shapes are what config.json says.
        ignored: names that may be there and are not wanted (the head of a model whose head is tied).

    Raises:
        ModelError: names the file, and the tensor with both shapes.
    """
    with Checkpoint(folder) as checkpoint:
        checkpoint.check({name: tuple(view.shape) for name, view in views.items()}, tied=_TIED_HEAD in ignored)
        for name, view in views.items():
            view.copy_(checkpoint.rows(name, 0, view.shape[0]))


def revision(folder: Path) -> str:
    """Changes when a file of the weights is replaced: from names, sizes and times, without reading them. Raises ModelError."""
    digest = xxhash.xxh3_64()
    for path in _files(folder):
        try:
            stat = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}; fetch it again") from None
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        parts = read_json(index).get("weight_map")
        if not isinstance(parts, dict) or not parts:
            raise ModelError(f"{index}: has no weight_map; fetch it again")
        names = {
            name if isinstance(name, str) and name and Path(name).name == name and "\0" not in name else None
            for name in parts.values()
        }
        if None in names:
            raise ModelError(f"{index}: weight_map must say of each tensor which file of this folder holds it; fetch it again")
        return [folder / name for name in sorted(filter(None, names))]
    if single.is_file():
        return [single]
    raise ModelError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json; only safetensors are read")


def _open(path: Path) -> Any:
    if not os.path.isfile(path):
        raise ModelError(f"{path}: missing, though the index names it; fetch it again")
    with path.open("rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise ModelError(f"{path}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: truncated or no safetensors file ({error}); fetch it again") from None


def _places(path: Path) -> dict[str, Stored]:
    """From the header, which the library has checked when it opened the file: length, JSON, then the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    places = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _DTYPES:
            begin, end = entry["data_offsets"]
            places[name] = Stored(path, 8 + length + begin, end - begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return places


def _check_names(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], ignored: frozenset[str]) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{_more(missing)}, though config.json asks for it")
    extra = sorted(name for name in found if name not in wanted and name not in ignored and not _DERIVED.fullmatch(name))
    if extra:
        raise ModelError(f"{folder}: tensor {extra[0]}{_more(extra)} has no place in the model that config.json describes")


def _check_tensor(folder: Path, file: Any, name: str, wanted: tuple[int, ...]) -> None:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    if shape != wanted:
        raise ModelError(f"{folder}: tensor {name} is {list(shape)}, but config.json says {list(wanted)}")
    if part.get_dtype() not in _DTYPES:
        raise ModelError(f"{folder}: tensor {name} is of type {part.get_dtype()}; only {', '.join(_DTYPES)} are read")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
