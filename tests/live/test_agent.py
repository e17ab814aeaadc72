"""An agent and the ssh session that it was started in: which of them ends with the other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
import os, sys, time
from pathlib import Path
from squall.live import agent

agent.END_S = 0.2
log = Path(sys.argv[1])
ssh = agent.SshSession(log)
ssh.watch()
if sys.argv[2] == "stays":
    ssh.outlive()
print(os.getsid(0) == os.getpid(), flush=True)
while not log.exists():
    time.sleep(0.01)
time.sleep(0.1)  # what it says goes there now
agent._say("still here")
"""


@pytest.mark.parametrize("stays", [True, False])
def test_an_agent_outlives_its_ssh_where_it_is_to(stays: bool, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    command = [sys.executable, "-c", AGENT, str(log), "stays" if stays else "goes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        assert agent.stdout.readline() == f"{stays}\n".encode()  # a session of its own
        if stays:
            agent.send_signal(signal.SIGHUP)
        agent.stderr.close()
        agent.stdin.close()
        assert agent.wait(30) == (0 if stays else 1)
    assert log.exists() == stays
    if stays:
        assert log.read_text() == "agent: still here\n"
