"""docs/configuration.md against the code: it has every key with its default, no other, and its example runs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from squall.config import POLICY_TABLES, Config, from_tree
from squall.fleet_tables import Fault
from squall.twin.rehearse import rehearse

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "configuration.md").read_text()
TABLES = {name: type(table) for name, table in ((name, getattr(Config(), name)) for name in Config.__struct_fields__)}
PLAIN = {name: kind for name, kind in TABLES.items() if name not in (*POLICY_TABLES, "workload")} | {"faults": Fault}


def _rows(table: str) -> dict[str, str]:
    """Keys and defaults of a table, as the page has them. One default stands for all keys of its row."""
    text = re.split(rf"^\| key of `\[+{table}\]+` \|.*\n\|---.*\n", PAGE, flags=re.MULTILINE)[1]
    found: dict[str, str] = {}
    for row in text.split("\n\n", 1)[0].splitlines():
        keys, told = row.split("|")[1:3]
        names = re.findall(r"`(\w+)`", keys)
        defaults = [each.strip(" `") for each in told.split(", ")]
        found |= dict(zip(names, defaults * len(names) if len(defaults) == 1 else defaults, strict=True))
    return found


def _told(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return None
    return list(field.default) if isinstance(field.default, tuple) else field.default


@pytest.mark.parametrize("table", PLAIN)
def test_every_key_is_there_with_its_default(table: str) -> None:
    rows = _rows(table)
    fields = {field.encode_name: _told(field) for field in msgspec.structs.fields(PLAIN[table])}
    if table == "slo":
        assert re.fullmatch(r"ttft_p\d\d_s", list(rows)[-1])
        fields = {name: default for name, default in fields.items() if not re.search(r"_p\d\d_s$", name) or name in rows}
    assert sorted(rows) == sorted(fields)
    for name, default in rows.items():
        told = None if default == "-" else tomllib.loads(f"value = {default}")["value"]
        assert (told, type(told)) == (fields[name], type(fields[name])), name


def test_every_table_is_named() -> None:
    assert [name for name in Config.__struct_fields__ if f"[{name}]" not in PAGE] == []


def test_the_example_runs() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    record = rehearse(from_tree("the page", tomllib.loads(text)))
    assert len(record.requests) == 1000
