"""The pages as a whole: the index has them all, and whatever they link to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _text(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE))
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_linked_to_is_there(page: Path) -> None:
    for path, anchor in LINK.findall(_text(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {path for path, _ in LINK.findall(index.read_text())}
    assert {page.name for page in index.parent.glob("*.md")} - {index.name} <= listed
