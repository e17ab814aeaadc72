"""How many files may be open: too few are refused before anything is started."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from squall.live.descriptors import FEWEST

SETTINGS = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.port=0")


@pytest.mark.parametrize("most", [30, FEWEST - 1])
def test_a_service_that_may_open_too_few_files_says_so_and_leaves_nothing(most: int, tmp_path: Path) -> None:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = shlex.join([sys.executable, "-m", "squall", "serve", *settings, "--out", str(tmp_path / "run")])
    said = subprocess.run(["sh", "-c", f"ulimit -n {most}; exec {command}"], capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert said.stderr == (
        f"squall: error: no more than {most} files may be open here, and serving takes {FEWEST} at least: "
        "raise the limit (ulimit -n 1024, or LimitNOFILE= of a service)\n"
    )
    assert not (tmp_path / "run").exists()
