"""Where squall keeps what it made for this user: models and compiled kernels. Knows nothing of what is in there."""

import os
from pathlib import Path


def home() -> Path:
    """`$SQUALL_HOME`, or `~/.cache/squall`. May not exist yet."""
    return Path(os.environ.get("SQUALL_HOME") or Path.home() / ".cache" / "squall")
