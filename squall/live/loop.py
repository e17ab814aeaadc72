"""The event loop that head and workers run on: uvloop where it is installed. Knows nothing of what runs on it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh loop."""
    try:
        try:
            import uvloop
        except ModuleNotFoundError:
            return asyncio.run(main)
        return uvloop.run(main)
    finally:
        main.close()  # a signal may have come before it began
