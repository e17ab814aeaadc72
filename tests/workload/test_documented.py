"""docs/workloads.md against the code: its examples are valid, and its tables leave nothing out."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from squall.workload.formats import FORMATS
from squall.workload.named import KNOWN
from squall.workload.spec import TRACE_FORMATS, Arrivals, Length, Workload
from squall.workload.traces import read_trace

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "workloads.md").read_text()
EXAMPLES = [
    table
    for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for table in re.split(r"\n(?=\[workload\])", block.strip())
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_workload(example: str) -> None:
    msgspec.convert(tomllib.loads(example)["workload"], Workload)


def test_there_are_examples_of_all_kinds() -> None:
    kinds = {tomllib.loads(example)["workload"]["kind"] for example in EXAMPLES}
    assert kinds == {kind.__struct_config__.tag for kind in get_args(Workload)}


@pytest.mark.parametrize("union", [Workload, Arrivals, Length])
def test_every_kind_is_in_a_table_with_all_its_keys(union: Any) -> None:
    for kind in get_args(union):
        rows = re.findall(rf"^\| `{kind.__struct_config__.tag}` \|.*$", PAGE, re.MULTILINE)
        assert rows
        if union is not Workload:
            assert any(all(f"`{key}`" in row for key in kind.__struct_fields__) for row in rows)


def test_every_format_and_every_column_of_it_is_in_the_table() -> None:
    for form in FORMATS:
        (row,) = re.findall(rf"^\| `{form.name}` \|.*$", PAGE, re.MULTILINE)
        if form.name != "squall":
            assert all(f"`{name}`" in row for name in (*form.arrival, *form.prompt, *form.output, *form.optional))
        assert row.rstrip("| ").endswith(f"| {form.block_size}") or not form.block_size
    assert set(TRACE_FORMATS) - {form.name for form in FORMATS} == {"auto", "servegen"}


def test_every_named_workload_is_in_the_table() -> None:
    for name, known in KNOWN.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        assert not known.num_requests or f"{known.num_requests:,} requests" in row
        assert f"{known.start_s:g} s to {known.start_s + known.duration_s:g} s" in row or not known.rates_rps


def test_the_row_of_our_own_format_is_one(tmp_path: Path) -> None:
    (row,) = re.findall(r"^\{.*\}$", PAGE, re.MULTILINE)
    (tmp_path / "a.jsonl").write_text(row + "\n")
    trace = read_trace(tmp_path / "a.jsonl", "squall")
    assert (trace.arrived_at, trace.blocks, trace.block_size) == ([250_000_000], [[81, 7, 52]], 16)
