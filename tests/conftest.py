"""Fixtures that every test may use. Knows where the reference data may lie, not what is in it."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from squall.cores import num_cores

# A busy machine is no failure. Where a change is judged, chance is none either: new examples are for those who look for them.
judged = "CI" in os.environ
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=judged)
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]

LONGEST = (
    "live/engine/test_smollm2.py",
    "fault/test_head_returns_to_hosts.py",
    "fault/test_models_return.py",
    "live/test_host_launch.py",
    "live/test_weights_between_workers.py",
    "twin/test_demo.py",
    "sim/test_elastic.py",
    "fault/test_elastic_serve.py",
    "sim/test_chaos.py",
    "fault/test_head_returns.py",
    "live/engine/test_weights_between_processes.py",
    "live/test_parallel_moves.py",
    "live/transport/test_processes.py",
    "live/test_together.py",
    "sim/test_equivalence.py",
    "fault/test_serve_ends.py",
    "live/test_devices_between_workers.py",
    "live/test_chaos.py",
    "test_cli.py",
    "fault/test_workers_die.py",
)
"""The files that take longest, in order. They are begun first: one that began last would be waited for by all other processes."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`. Many tests wait for processes, links and clocks more than they compute."""
    return -(-3 * num_cores() // 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


MANY_OPEN_FILES = 400


def pytest_runtest_logfinish() -> None:
    # Engines of tests that have ended hold files (memory that stands for a device's, pipes to ranks) until somebody looks for
    # cycles, which Python seldom does for all; many a shell allows 1,024 of them.
    held = Path("/proc/self/fd")
    if held.is_dir() and len(list(held.iterdir())) > MANY_OPEN_FILES:
        gc.collect()


def pytest_sessionstart() -> None:
    # A shell starts what it puts into the background deaf to SIGINT, and so would be all that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python prefers an extension module of `make fast` to its source, also where the source is newer.
    for compiled in ROOT.glob("squall/*/*.so"):
        source = compiled.with_name(compiled.name.partition(".")[0] + ".py")
        if source.is_file() and source.stat().st_mtime > compiled.stat().st_mtime:
            pytest.exit(f"{source.relative_to(ROOT)} was changed since `make fast`: say `make fast` again, or `make plain`", 2)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data, which a user's clone does not have."""
    folder = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no reference data at {folder} (set SQUALL_SHARED to its folder)")
    return folder
