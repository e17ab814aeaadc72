"""Fixtures that every test may use. Knows where the reference data may lie, not what is in it."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]


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
