"""Typed access to a config.json, with errors that name the file, the field and the fix. Knows no architecture."""

from collections.abc import Mapping
from typing import Any

from squall.errors import ModelError


class Fields:
    """The fields of one model. `place` names the file (and the part of it) in errors; `defaults` are the family's own."""

    def __init__(self, config: Mapping[str, Any], place: str, defaults: Mapping[str, Any]) -> None:
        self.place = place
        self._config = {**defaults, **{key: value for key, value in config.items() if value is not None}}

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def get(self, key: str) -> Any:
        return self._config.get(key)

    def refuse(self, key: str, why: str) -> ModelError:
        """The error for a field whose value cannot be used."""
        return ModelError(f"{self.place}: {key} is {self._config.get(key)!r}; {why}")

    def size(self, key: str, hint: str = "add it") -> int:
        """A whole number above 0."""
        if key not in self._config:
            raise ModelError(f"{self.place}: {key} is missing; {hint}")
        value = self._config[key]
        if type(value) is not int or value <= 0:
            raise self.refuse(key, "it must be a whole number above 0")
        return value

    def size_or(self, key: str, default: int) -> int:
        return self.size(key) if key in self._config else default

    def optional_size(self, key: str) -> int | None:
        return self.size(key) if key in self._config else None

    def count(self, key: str) -> int:
        """A whole number, 0 where it is absent."""
        return self.size(key) if self._config.get(key, 0) != 0 or isinstance(self._config.get(key), bool) else 0

    def flag(self, key: str) -> bool:
        """Absent is False, unless the family's defaults say otherwise."""
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def rows(self, key: str) -> list[Any]:
        """A list; empty where it is absent."""
        value = self._config.get(key, [])
        if not isinstance(value, list):
            raise self.refuse(key, "it must be a list")
        return value
