"""The JSON files of a checkpoint. Knows how to say which one is wrong, not what is in them."""

import json
from pathlib import Path
from typing import Any

from squall.errors import ModelError


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; `default`, where given, if there is no such file. Raises ModelError."""
    if default is not None and not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: missing; a checkpoint needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from None
    except RecursionError:
        raise ModelError(f"{path}: not readable as JSON (nested too deeply)") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value
