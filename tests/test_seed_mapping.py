"""The page that maps the seed's verbs maps all of them, to words that exist."""

import re
from pathlib import Path
from typing import get_args

import pytest

from squall.core.actions import AnyAction
from squall.core.events import AnyEvent

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "seed-mapping.md").read_text(encoding="utf-8")

VERBS = [
    "PrefillV2", "ZagPrefill", "DecodeV2", "ClearCache", "FilterBatch", "Prefill", "Decode", "Warmup", "Migrate", "Immigrate",
    "MigratePartial", "ImmigratePartial", "Relay", "LoadParams", "SendParams", "RecvParams", "RdmaBroadcast", "NvlBroadcast",
    "TanzBroadcast", "WaitRdmaDone", "ResetStatus", "SetStatusReady", "Info", "Health", "ServiceDiscovery",
]  # fmt: skip
MESSAGES = ["PrefillDone", "Prefill", "Intermediate", "End"]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("word", [*VERBS, *MESSAGES])
def test_every_verb_and_message_has_a_row(word: str) -> None:
    assert any(f"`{word}`" in row[0] for row in ROWS)


def test_every_row_says_when() -> None:
    assert {row[-1] for row in ROWS} == {"now"}


def test_what_is_built_is_said_in_words_that_exist() -> None:
    built = {word.__name__ for union in (AnyEvent, AnyAction) for word in get_args(union)} | {"Chunk", "Request"}
    for row in ROWS:
        words = set(re.findall(r"`([A-Z][a-z]\w+)`", row[-2]))
        assert words <= built, row
