"""Tests of the charts in the terminal."""

import pytest

from graftwork.api.cli.bench.page import Bars, Lines
from graftwork.api.cli.bench.terminal_plot import plot

BARS = Bars("Throughput", "tokens/s", [("1 chat", 100.0), ("2 chats", 200.0), ("4 chats", None)])
LINES = Lines("Latency", "ms", "chats", [("p50", [(0, 0), (5, 50)]), ("p99", [(10, 100)])])


def test_bars_are_as_long_as_their_values() -> None:
    """The largest bar fills its room, one of half its value half of it, and no value has no bar."""
    _, half, whole, none = plot([BARS], 80).splitlines()

    assert whole.count("█") == 2 * half.count("█") + (1 if half[-1] != "█" else 0)
    assert len(whole) <= 80
    assert none.endswith("–")


def test_points_stand_where_their_values_are() -> None:
    """The point at the origin is below left, that of the largest values above right, and one of half between."""
    title, *rows = plot([LINES], 60).splitlines()
    body = [row.partition("┤")[2] for row in rows[:10]]

    assert title == "Latency (ms)   ● p50  ▲ p99"
    assert body[0].rstrip()[-1] == "▲"
    assert body[-1][0] == "●"
    middle = next(number for number, row in enumerate(body) if "●" in row[1:])
    assert middle in (4, 5)
    assert abs(body[middle].index("●") - body[0].index("▲") / 2) <= 1


@pytest.mark.parametrize("columns", [20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    """Charts fit terminals of usual widths, and are not stretched over very wide ones."""
    widest = max(map(len, plot([BARS, LINES], columns).splitlines()))

    assert widest <= max(min(columns, 100), 44)


def test_charts_without_values_are_drawn_too() -> None:
    """A chart of zeros, and one without points, are no errors."""
    assert "█" not in plot([Bars("Empty", "s", [("a", 0.0), ("b", None)])], 80)
    assert "no points" in plot([Lines("Empty", "s", "x", [])], 80)
