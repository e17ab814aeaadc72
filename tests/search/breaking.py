"""Batching policies that break the search's processes in ways that a user's own can."""

import os
import signal

from msgspec import Struct

from squall.core.views import BatchingView, Plan


class Raising(Struct, frozen=True):
    """Raises as soon as it is asked."""

    prefix_cache: bool = True

    def __call__(self, view: BatchingView) -> Plan:
        raise ZeroDivisionError("nothing to divide by")


class Killing(Struct, frozen=True):
    """Takes its process with it."""

    prefix_cache: bool = True

    def __call__(self, view: BatchingView) -> Plan:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")
