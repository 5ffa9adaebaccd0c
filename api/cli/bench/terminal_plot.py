"""Draws the charts of a measurement in the terminal, with characters alone. Never computes a figure."""

import shutil
from collections.abc import Sequence

from graftwork.api.cli.bench.page import Bars, Lines

_EIGHTHS = " ▏▎▍▌▋▊▉"
_MARKS = "●▲■◆○△"
_HEIGHT = 10
_MOST_COLUMNS = 100
_LABEL, _NUMBER = 24, 9


def plot(charts: Sequence[Bars | Lines], columns: int | None = None) -> str:
    """Returns all charts as text, at most `columns` characters wide; by default as wide as the terminal."""
    width = min(columns or shutil.get_terminal_size().columns, _MOST_COLUMNS)
    return "\n\n".join("\n".join(_bars(one, width) if isinstance(one, Bars) else _lines(one, width)) for one in charts)


def _bars(chart: Bars, width: int) -> list[str]:
    """A bar for each value, exact to an eighth of a character."""
    most = max((value for _, value in chart.values if value is not None), default=0.0)
    labels = [_cut(label, _LABEL) for label, _ in chart.values]
    margin = max(map(len, labels), default=0)
    room = max(width - margin - _NUMBER - 3, 8)
    lines = [f"{chart.title} ({chart.unit})"]
    for label, (_, value) in zip(labels, chart.values, strict=True):
        number = "–" if value is None else f"{value:.4g}"
        eighths = 0 if value is None or most <= 0 else round(max(value, 0.0) / most * room * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"{label.ljust(margin)} {number.rjust(_NUMBER)} {bar}".rstrip())
    return lines


def _lines(chart: Lines, width: int) -> list[str]:
    """Points over two axes that begin at 0. Each series has a mark of its own."""
    points = [point for _, series in chart.series for point in series]
    if not points:
        return [f"{chart.title} ({chart.unit})", "no points"]
    right, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    room = max(width - _NUMBER - 2, 16)
    grid = [[" "] * room for _ in range(_HEIGHT)]
    for number, (_, series) in enumerate(chart.series):
        for x, y in series:
            row = _HEIGHT - 1 - round(max(y, 0.0) / top * (_HEIGHT - 1))
            grid[row][round(max(x, 0.0) / right * (room - 1))] = _MARKS[number % len(_MARKS)]
    names = "  ".join(f"{_MARKS[place % len(_MARKS)]} {name}" for place, (name, _) in enumerate(chart.series))
    lines = [f"{chart.title} ({chart.unit})   {names}"[:width]]
    for place, cells in enumerate(grid):
        label = f"{top:.4g}" if place == 0 else "0" if place == _HEIGHT - 1 else ""
        lines.append(f"{label.rjust(_NUMBER)} ┤{''.join(cells)}".rstrip())
    end = f"{right:.4g} {chart.x}"
    lines.append(f"{' ' * _NUMBER} └{'─' * room}")
    lines.append(f"{' ' * (_NUMBER + 2)}0{end.rjust(room - 1)}")
    return lines


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
