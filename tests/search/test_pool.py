"""Jobs on processes: whoever dies takes one job along, whatever breaks is one result."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from squall.errors import ConfigError
from squall.search.cluster import Cluster
from squall.search.evaluate import evaluate
from squall.search.pool import Inline, Processes
from squall.search.result import Job
from squall.search.setting import Workshop
from tests.search.conftest import job, question

KILLING = {"batching": {"kind": "breaking:Killing"}}
RAISING = {"batching": {"kind": "breaking:Raising"}}


@pytest.fixture(autouse=True)
def _own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def numbered(number: int, **choice: object) -> Job:
    asked = job(choice)
    return Job(number, asked.choice, asked.tree, num_requests=60, warm_up=6)


def test_a_worker_that_dies_is_one_failed_configuration() -> None:
    pool = Processes(question(), 2)
    jobs = [numbered(0), numbered(1, **KILLING), numbered(2, **KILLING), numbered(3, **{"batching.max_num_seqs": 8})]
    try:
        results = {result.number: result for result in pool.run(jobs)}
        again = list(pool.run([numbered(4)]))
    finally:
        pool.close()
    assert {number: result.status for number, result in results.items()} == {0: "done", 1: "failed", 2: "failed", 3: "done"}
    assert results[1].reason == "its worker died twice: signal 9 (SIGKILL)"
    assert again[0].capacity_rps == results[0].capacity_rps


def test_a_worker_that_somebody_kills_changes_nothing() -> None:
    """One that waits for work, and one that is at it: their jobs go to others."""
    pool = Processes(question(), 2)
    try:
        first = list(pool.run([numbered(0), numbered(1)]))
        idle = multiprocessing.active_children()[0]
        os.kill(idle.pid or 0, signal.SIGKILL)
        idle.join()
        second = list(pool.run([numbered(2), numbered(3)]))
        third = []
        for place, result in enumerate(pool.run([numbered(number) for number in range(4, 10)])):
            if not place:
                os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            third.append(result)
    finally:
        pool.close()
    assert sorted(result.number for result in first + second + third) == list(range(10))
    assert {result.capacity_rps for result in first + second + third} == {first[0].capacity_rps}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see what a process blocks")
def test_ctrl_c_is_never_for_a_worker() -> None:
    """Not even for one that has only just begun, and does not know yet that it should not listen."""
    pool = Processes(question(), 1)
    try:
        list(pool.run([numbered(0)]))
        status = Path(f"/proc/{multiprocessing.active_children()[0].pid}/status").read_text()
    finally:
        pool.close()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    assert int(blocked, 16) & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # but for us it is


def test_a_policy_that_raises_is_one_failed_configuration() -> None:
    workshop = Workshop(question())
    found = list(Inline(workshop).run([numbered(0, **RAISING), numbered(1)]))
    assert [result.status for result in found] == ["failed", "done"]
    assert found[0].reason == "ZeroDivisionError: nothing to divide by"


def test_a_pool_that_is_left_in_the_middle_leaves_no_process_behind() -> None:
    pool = Processes(question(), 2)
    for _ in pool.run([numbered(number) for number in range(6)]):
        break
    pool.close()
    assert multiprocessing.active_children() == []


def test_a_cluster_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("squall.search.cluster.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"needs Ray.*squall\[ray\]"):
        Cluster(question(), "auto")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_gives_the_same_results() -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'squall[ray]'")
    workers = Cluster(question(), "local")
    try:
        found = list(workers.run([numbered(0)]))
    finally:
        workers.close()
    assert found == [evaluate(Workshop(question()), numbered(0))]
