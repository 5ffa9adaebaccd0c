"""Draws bars in a terminal.

Owns the form of the bars: eighths of a character cell, so that small differences show.
"""

import shutil
from collections.abc import Sequence

import typer

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
_LEAST_WIDTH = 10


def show_bars(title: str, values: Sequence[tuple[str, float | None]]) -> None:
    """Prints a title, and a line with a bar for each pair (label, value). The longest bar fills the terminal's width.

    A value below 0, or None, has no bar.
    """
    typer.echo(title)
    for line in bar_lines(values, shutil.get_terminal_size().columns):
        typer.echo(line)


def bar_lines(values: Sequence[tuple[str, float | None]], width: int) -> list[str]:
    """Returns one line for each pair (label, value), at most `width` characters long if that leaves room for bars."""
    texts = ["–" if value is None else f"{value:,.6g}" for _, value in values]
    label_width = max((len(label) for label, _ in values), default=0)
    room = max(width - label_width - max(map(len, texts), default=0) - 4, _LEAST_WIDTH)
    most = max((value or 0.0 for _, value in values), default=0.0)
    return [
        f"{label.ljust(label_width)}  {_bar(value or 0.0, most, room)} {text}"
        for (label, value), text in zip(values, texts, strict=True)
    ]


def _bar(value: float, most: float, room: int) -> str:
    """Returns a bar of `room` cells for the value `most`, and a shorter one for a lower value."""
    eighths = round(8 * room * value / most) if value > 0 else 0
    return _FULL * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
