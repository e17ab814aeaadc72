"""Where the recorded runs of the reference simulator lie. Knows nothing of what they hold."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden(shared: Path) -> Path:
    folder = shared / "data" / "vidur_golden"
    if not folder.is_dir():
        pytest.skip(f"no recorded runs at {folder}")
    return folder
