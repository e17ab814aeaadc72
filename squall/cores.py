"""How many cores this process may use. Knows nobody who uses them."""

import os


def num_cores() -> int:
    """Those that it is bound to where the system says so, else all; at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
