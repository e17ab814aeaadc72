"""docs/scaling.md against the code: its tables leave nothing out, and its example is read."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from squall.policies.load import Load
from squall.policies.scale import Scale, Schedule

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("kind", [*get_args(Scale), *get_args(Load)], ids=lambda kind: str(kind.__name__))
def test_every_kind_is_in_its_table_with_all_its_keys(kind: Any) -> None:
    [row] = re.findall(rf"^\| `{kind.__struct_config__.tag}`(?: \(default\))? \|.*$", PAGE, re.MULTILINE)
    keys = row.rsplit("|", 2)[1]
    assert sorted(re.findall(r"`(\w+)`", keys)) == sorted(kind.__struct_fields__)


def test_the_example_is_a_schedule() -> None:
    text = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    policy = msgspec.convert(tomllib.loads(text)["scale"], Scale)
    assert isinstance(policy, Schedule)
    assert [step.replicas for step in policy.steps] == [2, 8, 3]
