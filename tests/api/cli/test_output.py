"""Tests of output: tables on a terminal, plain columns in a pipe."""

import json

import pytest

from graftwork.api.cli.console import output


def test_columns_are_aligned_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe, text is aligned left and numbers right, without colours, and None is empty."""
    output.show_table(("name", "size"), [("a", 5), ("longer", 12345), ("none", None)], "Nothing.")

    assert capsys.readouterr().out == "NAME     SIZE\na           5\nlonger  12345\nnone        –\n"


def test_an_empty_table_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table prints what to do next instead of a header."""
    output.show_table(("name",), [], "None yet: make one.")

    assert capsys.readouterr().out == "None yet: make one.\n"


def test_a_terminal_gets_rules(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the table has a ruled header, and brackets are printed as text."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    output.show_table(("name",), [("[red]x",)], "Nothing.")

    shown = capsys.readouterr().out
    assert "[red]x" in shown
    assert "─" in shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**41, "2.0 TiB")]
)
def test_sizes_have_units(num_bytes: int | None, shown: str) -> None:
    """A size is printed in the unit that keeps its number below 1024."""
    assert output.size(num_bytes) == shown


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With JSON output, standard output has the data and nothing else."""
    output.show_json({"name": "Grüße", "n": None})

    assert json.loads(capsys.readouterr().out) == {"name": "Grüße", "n": None}


def test_yes_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--yes` no question is printed on either stream."""
    output.confirm("Sure?", yes=True)

    assert capsys.readouterr() == ("", "")


def test_moments_are_utc() -> None:
    """Times are printed in UTC whatever the machine's time zone."""
    assert output.moment(0) == "–"
    assert output.moment(86_400) == "1970-01-02 00:00:00"
