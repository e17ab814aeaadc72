"""Values that are worked out once a size, when they are first asked for. Knows no price.

Looked up as in any dictionary, which takes half of what a call of a `functools.cache` does: every step passes several.
"""

from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")


class WorkedOut(dict[int, V]):
    """`self[size]` is `function(size)`."""

    def __init__(self, function: Callable[[int], V]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, size: int) -> V:
        value = self[size] = self._function(size)
        return value
