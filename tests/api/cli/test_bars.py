"""Tests of bars in a terminal."""

from graftwork.api.cli.console.bars import bar_lines


def test_the_longest_bar_fills_the_width() -> None:
    """The largest value has the longest line, which is as wide as the terminal; half of it has half the bar."""
    lines = bar_lines([("2026-11-01", 50.0), ("2026-11-02", 100.0)], 60)

    assert [line.count("█") for line in lines] == [21, 43]
    assert len(lines[1]) == 60 - 1


def test_small_differences_show() -> None:
    """A value that is one eighth of a cell longer has a longer bar."""
    near, full = bar_lines([("a", 799.0), ("b", 800.0)], 100)

    assert near != full


def test_nothing_and_unknown_have_no_bar() -> None:
    """A value of 0, one that is unknown, and no values at all are drawn without bars."""
    assert bar_lines([("a", 0.0), ("b", None)], 40) == ["a   0", "b   –"]
    assert bar_lines([], 40) == []
