"""The safetensors files of a checkpoint in Hugging Face layout. Knows files and names, not what the tensors are for.

Nothing is trusted: a file that is cut short, a tensor that is missing, too many or of another shape than config.json says is
one line that names it.
"""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from squall.errors import ModelError
from squall.live.engine.jsonfile import read_json

_DTYPES = ("F32", "F16", "BF16")
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # old exports keep what can be computed


def load_checkpoint(folder: Path, views: Mapping[str, Tensor], ignored: frozenset[str] = frozenset()) -> None:
    """Copy every tensor of the checkpoint into the view of its name, converting number types.

    Args:
        views: where each tensor goes; their shapes are what config.json says.
        ignored: names that may be there and are not wanted (the head of a model whose head is tied).

    Raises:
        ModelError: names the file, and the tensor with both shapes.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _files(folder)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping, it only has keys()
        _check_names(folder, where, views, ignored)
        for name, view in views.items():
            _check_tensor(folder, where[name], name, view)
        for name, view in views.items():
            view.copy_(where[name].get_tensor(name))


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


def _check_names(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Tensor], ignored: frozenset[str]) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"{folder}: tensor {missing[0]} is missing{_more(missing)}, though config.json asks for it")
    extra = sorted(name for name in found if name not in wanted and name not in ignored and not _DERIVED.fullmatch(name))
    if extra:
        raise ModelError(f"{folder}: tensor {extra[0]}{_more(extra)} has no place in the model that config.json describes")


def _check_tensor(folder: Path, file: Any, name: str, view: Tensor) -> None:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    if shape != tuple(view.shape):
        raise ModelError(f"{folder}: tensor {name} is {list(shape)}, but config.json says {list(view.shape)}")
    if part.get_dtype() not in _DTYPES:
        raise ModelError(f"{folder}: tensor {name} is of type {part.get_dtype()}; only {', '.join(_DTYPES)} are read")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
