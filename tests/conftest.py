"""Fixtures that every test may use. Knows where the reference data may lie, not what is in it."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data, which a user's clone does not have."""
    folder = Path(os.environ.get("SQUALL_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no reference data at {folder} (set SQUALL_SHARED to its folder)")
    return folder
