"""A run directory is there in full or not at all, and says the same when it is read back."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import polars as pl
import pytest

from squall import config as configuration
from squall.config import Config
from squall.core.metrics import RunRecord
from squall.errors import ConfigError, SquallError
from squall.report.run import StoredRun, place_for, read_run, write_file, write_run
from squall.report.summary import Lives

Record = Callable[..., RunRecord]
Stored = Callable[..., StoredRun]


@contextmanager
def small_disk() -> Iterator[None]:
    """Files may not grow past 600 bytes: a configuration fits, a Parquet file does not.

    Not a fixture: pytest prints a test's result before it undoes fixtures, and what it prints may go to a file, too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_is_read_back_as_it_was(record: Record, stored: Stored) -> None:
    was, run = record(), stored()
    assert run.gaps() == was.gaps
    lives, before = run.lives(), Lives.of(was.requests)
    for name in Lives.__struct_fields__:
        assert getattr(lives, name).tolist() == getattr(before, name).tolist()
    assert run.summary.completed == 19
    assert run.summary.rejected == 1


def test_the_directory_holds_the_promised_files_and_nothing_else(stored: Stored, tmp_path: Path) -> None:
    run = stored()
    assert sorted(path.name for path in run.path.iterdir()) == ["config.toml", "gaps.parquet", "requests.parquet", "summary.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert msgspec.json.decode((run.path / "summary.json").read_bytes())["slo_attainment"] == 0.95


def test_the_resolved_configuration_can_be_loaded_again(record: Record, tmp_path: Path) -> None:
    config = configuration.load(None, ["fleet.replicas=3", "slo.ttft_s=0.5"])
    write_run(tmp_path / "run", record(), config, None)
    assert configuration.load(tmp_path / "run" / "config.toml", []) == config


def test_instants_that_never_came_are_null_in_the_table(stored: Stored) -> None:
    frame = pl.read_parquet(stored().path / "requests.parquet")
    last = frame.row(-1, named=True)
    assert (last["outcome"], last["error"], last["arrived_at"]) == ("rejected", "queue_full", 19_000_000_000)
    assert (last["replica"], last["scheduled_at"], last["first_token_at"], last["finished_at"]) == (None, None, None, None)
    assert frame["id"].to_list() == list(range(20))


def test_an_existing_directory_is_never_replaced(record: Record, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"run exists already; choose another run directory \(--out\) or remove it"):
        place_for("simulate", str(tmp_path / "run"))
    with pytest.raises(SquallError, match=r"cannot write the run directory .*run: .*exists"):
        write_run(tmp_path / "run", record(), Config(), None)
    assert list((tmp_path / "run").iterdir()) == []


def test_runs_without_a_name_are_numbered_within_a_second(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = []
    for _ in range(3):
        places.append(place_for("simulate", None))
        write_run(places[-1], record(), Config(), None)
    assert len({place.name for place in places}) == 3
    assert all(place.parent == Path("runs") and place.name.startswith("simulate-2") for place in places)


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(record: Record, tmp_path: Path) -> None:
    refusal = pytest.raises(SquallError, match=r"cannot write the run directory .*run: File too large")
    with refusal as caught, small_disk():
        write_run(tmp_path / "run", record(), Config(), None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_an_older_file_as_it_was(tmp_path: Path) -> None:
    write_file(tmp_path / "report.html", b"old")
    with pytest.raises(SquallError, match=r"cannot write .*report.html: File too large"), small_disk():
        write_file(tmp_path / "report.html", bytes(1000))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("report.html", b"old")]


def test_what_is_no_run_directory_is_said_to_be_none(stored: Stored, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory: it has no summary.json"):
        read_run(tmp_path)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"no summary.json; where a fleet was served, `squall report .*served` makes one"):
        read_run(tmp_path / "served")
    run = stored()
    config = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text("[slo")
    with pytest.raises(ConfigError, match=r"cannot be read as a run directory: Expected ']'"):
        read_run(run.path)
    (run.path / "config.toml").write_text(config)
    (run.path / "summary.json").write_text('{"world": 3}')
    with pytest.raises(ConfigError, match=r"cannot be read as a run directory: Expected `str`, got `int`"):
        read_run(run.path)
    (run.path / "requests.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"requests.parquet cannot be read"):
        run.lives()
