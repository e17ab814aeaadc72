"""docs/api.md says what the code does: paths, fields, errors, metrics and spans are compared."""

import re
from pathlib import Path
from typing import Any

import httpx

from squall.config import load
from squall.live.api.app import MAX_BODY_BYTES
from squall.live.api.gate import OPEN_PATHS
from squall.live.api.order import MAX_CHOICES
from squall.live.api.unsupported import HARMLESS, REFUSED

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `") or re.match(r"\| \d", line)
    ]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


async def test_every_path_takes_the_methods_that_the_page_gives_it_and_no_others(client: httpx.AsyncClient) -> None:
    table = {code(row[0])[0]: set(row[1].split(", ")) for row in rows(section("Paths"))}
    assert len(table) == 15
    for path, methods in table.items():
        answer = await client.delete(path.replace("{id}", "small"))
        assert answer.status_code == 405, path
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == methods


def test_the_open_paths_and_limits_are_the_right_ones() -> None:
    sentence = section("Paths").partition("Open without one are")[2].partition(". ")[0]
    assert set(code(sentence)) == set(OPEN_PATHS)
    assert f"at most {MAX_BODY_BYTES >> 20} MiB" in PAGE
    assert f"at most {MAX_CHOICES:,} sub-requests" in PAGE


def test_what_is_ignored_and_what_is_refused_is_listed() -> None:
    ignored, _, refused = section("Fields").partition("Accepted and ignored")[2].partition("Refused with a 400")
    assert set(code(ignored)) - {"squall_unknown_fields_total"} == set(HARMLESS)
    assert set(code(refused)) - {'{"type": "text"}'} == set(REFUSED)


async def test_every_field_of_the_page_is_known(chat: Any, complete: Any, scrape: Any) -> None:
    table = rows(section("Fields"))
    for name in (name for row in table for name in code(row[0])):
        post = complete if "completions" in row_of(name, table) else chat
        await post(**{name: None} if name in ("model", "messages", "prompt", "max_tokens") else {"max_tokens": 8, name: None})
    assert (await scrape())['squall_unknown_fields_total{model="small"}'] == 0


def row_of(name: str, table: list[list[str]]) -> str:
    return next(" ".join(row[1:2]) for row in table if name in code(row[0]))


def test_every_error_code_of_the_page_is_one_of_the_code_and_the_other_way_round() -> None:
    folder = Path(__file__).parents[3] / "squall/live/api"
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    listed = {name for row in rows(section("Errors")) for name in code(row[2])}
    assert listed == set(re.findall(r'code="(\w+)"', source)) | {
        "invalid_value", "rate_limit_exceeded", "draining", "no_capacity", "internal_error", "context_length_exceeded",
    }  # fmt: skip


async def test_every_metric_of_the_page_is_exported_and_the_other_way_round(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    listed = {re.sub(r"\{.*", "", name) for name in code(section("Metrics")) if re.match(r"squall_\w|vllm:\w", name)}
    assert listed == exported


def test_every_attribute_of_a_span_is_on_the_page_and_the_other_way_round() -> None:
    source = (Path(__file__).parents[3] / "squall/live/tracing.py").read_text()
    listed: list[str] = []
    for row in rows(section("Traces")):
        first, *others = code(row[0])
        group = first.rpartition(".")[0]
        listed += [first, *(f"{group}{name}" if name.startswith(".") else name for name in others)]
    assert sorted(listed) == sorted(re.findall(r'"((?:gen_ai|squall|error)\.[\w.]+)"', source))


def test_the_example_names_a_model_that_its_configuration_serves() -> None:
    (example,) = re.findall(r"squall serve (examples/\S+\.toml)", PAGE)
    served = load(Path(__file__).parents[3] / example).model.served_as
    assert any(f'model="{name}"' in PAGE for name in served)
