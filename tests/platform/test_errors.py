"""Tests of the tree of errors, of their HTTP answers, and of the table in the docs."""

import re
from pathlib import Path

import pytest

from graftwork.platform.errors import BudgetSpent, CapacityContended, Conflict, GraftworkError, error_classes

TREE = {name: found for name, found in error_classes().items() if found.__module__ == GraftworkError.__module__}
TABLE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_table_in_the_docs_is_the_tree() -> None:
    """docs/errors.md lists every error class with its status and code, and no other."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    branches = {name: found for name, found in TREE.items() if found is not GraftworkError}

    assert {name: (int(status), code) for name, status, code in rows} == {
        name: (found.status, found.default_code) for name, found in branches.items()
    }


@pytest.mark.parametrize("error_class", TREE.values(), ids=lambda found: found.__name__)
def test_every_error_has_openais_four_fields(error_class: type[GraftworkError]) -> None:
    """Every error has message, type, param and code, and its details beside them."""
    body = error_class("Say what to do.", param="field", details={"head": "ckp_1"}).body()

    assert set(body["error"]) == {"message", "type", "param", "code", "head"}
    assert body["error"]["param"] == "field"


def test_waiting_is_named_in_seconds_and_milliseconds() -> None:
    """A retry-after of 0.25 s is written as 1 second and as 250 milliseconds."""
    headers = CapacityContended("Full.", retry_after_s=0.25).headers()

    assert headers == {"retry-after": "1", "retry-after-ms": "250"}


@pytest.mark.parametrize("error_class", [BudgetSpent, Conflict])
def test_what_waiting_does_not_mend_says_so(error_class: type[GraftworkError]) -> None:
    """An error that a retry cannot help says so to clients that retry 409 and 429 by default."""
    assert error_class("No.").headers()["x-should-retry"] == "false"
