"""Tests that the pages of docs/ agree with the tree."""

import re
from pathlib import Path

import pytest

from tests.test_layout import OTHER_FOLDERS, ROOMS
from tests.tree import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
FOLDERS = "|".join((*ROOMS, *OTHER_FOLDERS, "tests", "benchmarks", "docs", "examples", "src"))
NAMED_FILE = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\.(?:py|md|proto|lua|json|sh)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Every path from the root that a page names is a file."""
    named = set(NAMED_FILE.findall(page.read_text("utf-8")))

    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_decisions_are_numbered_without_gaps() -> None:
    """The decisions are numbered from 0001 without a gap."""
    numbers = [int(page.name[:4]) for page in DECISIONS]

    assert numbers == list(range(1, len(numbers) + 1))


def test_the_index_of_decisions_is_complete() -> None:
    """The index lists each decision under its title."""
    index = (DOCS / "decisions" / "README.md").read_text("utf-8")
    titles = {page: page.read_text("utf-8").partition("\n")[0].removeprefix("# ").split(". ", 1) for page in DECISIONS}

    missing = [
        page.name
        for page, (number, title) in titles.items()
        if f"| [{number}]({page.name}) | {title} |" not in index or not page.name.startswith(number)
    ]
    assert missing == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_parts(page: Path) -> None:
    """Each decision has status, context, decision and consequences, in this order."""
    text = page.read_text("utf-8")

    assert re.search(r"^Status: (accepted|replaced by \d{4})\.$", text, re.MULTILINE)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


HOPS = [
    pytest.param(ROOT / path, name, id=f"{path}-{name}")
    for path, name in re.findall(
        r"^\| `([\w/.]+)` \| `(\w+)` \|", (DOCS / "life-of-a-request.md").read_text("utf-8"), re.MULTILINE
    )
]


@pytest.mark.parametrize(("path", "name"), HOPS)
def test_each_hop_of_a_request_is_where_the_page_says(path: Path, name: str) -> None:
    """Each class or function of the request's life is defined in the file that the page names."""
    assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", path.read_text("utf-8"), re.MULTILINE)
