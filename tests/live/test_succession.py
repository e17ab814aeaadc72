"""Which heads may follow one another."""

import re
from pathlib import Path
from typing import Any

import pytest

from squall import config as configuration
from squall.live.succession import estate_of, fleet_of, roster_of

HOSTS = ("launcher.kind=hosts", 'launcher.hosts=[{hostname="alpha"}]', "launcher.listen=127.0.0.1:7000")


def fleet(*settings: Any) -> str:
    return fleet_of(configuration.load(None, settings))


@pytest.mark.parametrize("setting", ["serve.port=9000", "serve.host=0.0.0.0", "run.out=elsewhere"])
def test_where_a_head_itself_listens_and_writes_is_its_own_business(setting: str) -> None:
    assert fleet(setting) == fleet()


@pytest.mark.parametrize(
    "setting", ["batching.max_num_seqs=7", "serve.device=cuda", "launcher.outlive_s=5", "model.name=llama-3.1-8b"]
)
def test_what_workers_are_told_is_not(setting: str) -> None:
    assert fleet(setting) != fleet()


def test_another_version_is_another_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fleet()
    monkeypatch.setattr("squall.live.succession.__version__", "0.0.0")
    assert fleet() != before


def test_the_next_head_of_hosts_knows_token_and_agents_whatever_its_configuration(tmp_path: Path) -> None:
    token = None
    for setting in ("batching.max_num_seqs=7", "batching.max_num_seqs=8"):
        left = roster_of(configuration.load(None, (*HOSTS, f"launcher.state={tmp_path}/state", setting)), print)
        assert left is not None
        with left:
            assert left.note("alpha")
            assert token in (None, left.token)
            token, last = left.token, left
            assert (tmp_path / "state" / "agents.json").stat().st_mode & 0o777 == 0o600
    last.clear()
    again = roster_of(configuration.load(None, (*HOSTS, f"launcher.state={tmp_path}/state")), print)
    assert again is not None
    with again:
        assert again.token != token


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("agents.json", b'{"token": 7}', r"Expected `str`, got `int` - at `\$.token`"),
        ("agents.json", b"", "Input data was truncated"),
        ("workers.json", b"{", "Input data was truncated"),
        ("workers.json", None, "it is no file"),
    ],
)
def test_what_cannot_be_read_of_an_earlier_head_is_said_in_one_line(
    file: str, damage: bytes | None, why: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.mkdir() if damage is None else path.write_bytes(damage)
    said: list[str] = []
    of_hosts = HOSTS if file == "agents.json" else ()
    config = configuration.load(None, (*of_hosts, f"launcher.state={tmp_path}"))
    left = roster_of(config, said.append) if of_hosts else estate_of(config, said.append)
    assert left is not None
    with left:
        assert left.token
    (line,) = said
    assert re.fullmatch(
        rf"{path} cannot be read \({why}\): what an earlier head has left is not taken over, and ends by itself", line
    )


def test_without_a_folder_nothing_is_left() -> None:
    assert roster_of(configuration.load(None), print) is None
    assert estate_of(configuration.load(None), print) is None


def test_of_several_models_all_count() -> None:
    chat, code = configuration.load(None), configuration.load(None, ["batching.max_num_seqs=7"])
    assert len({fleet_of(chat), fleet_of(chat, code), fleet_of(code, chat)}) == 3
