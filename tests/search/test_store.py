"""Results are worked out once: found again by content, and not lost when a search ends badly."""

import os
from pathlib import Path

import pytest

from squall.errors import SquallError
from squall.search.evaluate import evaluate
from squall.search.inquiry import Candidate, Inquiry
from squall.search.pool import Inline
from squall.search.result import Job, Result
from squall.search.setting import Workshop
from squall.search.space import choices, dimensions
from squall.search.spec import Search
from squall.search.store import Store, code_version, key_of
from tests.search.conftest import job, question, tree

DONE = Result(number=0, choice={"a": 1}, status="done", score=2.0, score_at_most=2.0)
BEATEN = Result(number=0, choice={"a": 1}, status="outbid", score_at_most=1.5)


def key(search: Search, asked: Job, code: str = "code") -> str:
    return key_of(search, asked, Workshop(search).setting(asked), code)


def test_a_key_is_of_the_content() -> None:
    search = question()
    same = key(search, job())
    assert key(search, job()) == same
    assert key(question(top=7, round=3), job()) == same  # they choose among results
    assert key(question(prices={"a100-80g": {"on_demand": 2.29}}), job()) == same
    different = [
        key(search, job(), "other code"),
        key(search, job({"replica.tp": 2})),
        key(search, job(seed=1)),
        key(search, job(factor=1.1)),
        key(search, job(num_requests=50)),
        key(question(slo={"e2e_p99_s": 9}), job()),
        key(question(tolerance=0.02), job()),
        key(question(prices={"a100-80g": {"on_demand": 1}}), job()),
        key(search, job(base=tree(slo={"ttft_p90_s": 2.0}))),
    ]
    assert len({same, *different}) == 10


def test_what_is_known_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store.jsonl"
    store = Store(path)
    store.add("k", job(), DONE)
    store.add("b", job(need=1.6), BEATEN)
    store.close()
    again = Store(path)
    assert again.num_known == 2
    found = again.find("k", Job(5, {"z": 1}, {}))
    assert found is not None
    assert (found.number, found.choice, found.score) == (5, {"z": 1}, 2.0)
    assert again.find("unknown", job()) is None


@pytest.mark.parametrize(("need", "settles"), [(None, False), (1.0, False), (1.5, True), (9.0, True)])
def test_that_something_was_beaten_settles_only_so_much(need: float | None, settles: bool) -> None:
    store = Store(None)
    store.add("b", job(need=1.6), BEATEN)
    assert (store.find("b", job(need=need)) is not None) == settles


def test_what_broke_is_tried_again() -> None:
    store = Store(None)
    store.add("k", job(), Result(number=0, choice={}, status="failed", reason="its worker died"))
    assert store.find("k", job()) is None


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    store = Store(path)
    store.add("k", job(), DONE)
    store.add("l", job(), DONE)
    store.close()
    os.truncate(path, path.stat().st_size - 30)
    again = Store(path)
    assert again.num_known == 1
    again.add("m", job(), DONE)
    again.close()
    assert Store(path).num_known == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    store = Store(path)
    path.symlink_to("/dev/full")
    with pytest.raises(SquallError, match=r"store.jsonl: No space left on device; 0 results are kept, run the same"):
        store.add("k", job(), DONE)
    store.close()


def candidates(found: Inquiry) -> list[Candidate]:
    return found.survey(choices(dimensions(found.search.space), found.search, found.tree))


def test_nothing_is_worked_out_twice(tmp_path: Path) -> None:
    search = question(space={"replica.tp": [1, 2]})
    workshop = Workshop(search)
    results = []
    for simulated in (2, 0):
        store = Store(tmp_path / "store.jsonl")
        found = Inquiry(search, tree(), workshop, Inline(workshop), store, code_version())
        results.append(found.ask(candidates(found), None))
        store.close()
        assert found.num_simulated == simulated
    assert results[0] == results[1]
    assert results[0][0] == evaluate(workshop, candidates(found)[0].job)


def test_what_is_no_file_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(SquallError, match="is no file that results can be kept in"):
        Store(tmp_path)


def test_two_searches_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    one, other = Store(path), Store(path)
    one.add("k", job(), DONE)
    found = other.find("k", Job(3, {"z": 1}, {}))
    assert found is not None
    assert found.number == 3
    other.add("l", job(), DONE)
    with path.open("ab") as file:
        file.write(b'{"key": "half of a li')  # a third one is at it
    assert one.find("l", job()) is not None
    assert one.find("half", job()) is None
    with path.open("ab") as file:
        file.write(b"ne\n")
    one.add("m", job(), DONE)
    assert other.find("m", job()) is not None
    one.close()
    other.close()
    assert Store(path).num_known == 3
