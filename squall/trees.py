"""Trees of tables as TOML has them: read from a file, overridden by `key=value`, paths made absolute. Knows no key but those that
name files, and those that others depend on (`kind`, and the fleet's mode).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from squall.errors import ConfigError
from squall.fleet_tables import UNUSED, Fleet
from squall.mistakes import kind_of


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of the file, overrides applied and paths absolute as in `load`; what they mean is not looked at.

    Raises ConfigError where the file cannot be read or an override is none.
    """
    tree = _read(path) if path is not None else {}
    _make_paths_absolute(tree, Path(path).resolve().parent if path is not None else Path.cwd())
    patches = [_override(override) for override in overrides]
    _leave_mode(tree, patches)
    for patch in patches:
        _make_paths_absolute(patch, Path.cwd())
        merge(tree, patch)
    return tree


def merge(tree: dict[str, Any], patch: dict[str, Any]) -> None:
    """Overlay `patch`. A table whose `kind` changes starts anew: the old kind's keys mean nothing to the new one."""
    for name, value in patch.items():
        old = tree.get(name)
        if isinstance(old, dict) and isinstance(value, dict) and kind_of(value) in (None, kind_of(old)):
            merge(old, value)
        else:
            tree[name] = value


def _leave_mode(tree: dict[str, Any], patches: Sequence[dict[str, Any]]) -> None:
    """A file's fleet whose mode is overridden starts anew with the roles that it has then, as a table of another `kind` does."""
    fleet = tree.get("fleet")
    wanted = [patch["fleet"]["mode"] for patch in patches if isinstance(patch.get("fleet"), dict) and "mode" in patch["fleet"]]
    if wanted and isinstance(fleet, dict) and wanted[-1] != fleet.get("mode", Fleet().mode):
        for name in UNUSED.get(str(wanted[-1]), ()):
            fleet.pop(name, None)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and a number of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; tables are two or three levels deep") from None


def _override(text: str) -> dict[str, Any]:
    """`a.b=1` as the tree {a: {b: 1}}. A value that is not a TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names):
        raise ConfigError(f"--set {text}: expected key=value, such as fleet.replicas=4")
    try:
        patch: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except (ValueError, RecursionError):
        patch = value.strip()
    for name in reversed(names):
        patch = {name: patch}
    return dict(patch)


def _make_paths_absolute(tree: dict[str, Any], base: Path) -> None:
    """In place. A model's name is a path when it says so (./x, /x, ~/x) or names something that exists there."""
    for name, value in tree.items():
        if isinstance(value, dict):
            _make_paths_absolute(value, base)
        elif name in ("path", "state") and isinstance(value, str):
            tree[name] = str(base / os.path.expanduser(value))  # pathlib's raises where there is no such user
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        name = model["name"]
        path = base / os.path.expanduser(name)
        if name.startswith((".", "/", "~")) or ("/" in name and os.path.exists(path)):
            model["name"] = str(path)
