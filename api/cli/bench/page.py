"""Writes the results of a measurement as one HTML file without scripts: a table, and charts drawn in SVG.

Owns how the page looks. Never computes a figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_BAR_WIDTH, _BAR_HEIGHT, _LABEL_WIDTH = 420, 22, 220
_PLOT_WIDTH, _PLOT_HEIGHT, _MARGIN = 560, 180, 60
_COLOURS = ("#4a7ebb", "#b3261e", "#176b3a", "#8a5fb0", "#b07a1e", "#3a8f93")
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child"
    "{text-align:left}.holds{color:#176b3a}.fails{color:#b3261e}.undecided{color:#8a6d00}svg text{font:13px system-ui,sans-serif}"
)


@dataclass(frozen=True, slots=True)
class Bars:
    """One chart: a bar for each label. A value of None has no bar."""

    title: str
    unit: str
    values: Sequence[tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class Lines:
    """One chart: a line for each series of points, all over one axis that begins at 0."""

    title: str
    unit: str
    x: str
    """What the horizontal axis is, with its unit."""
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that the measurement checks, and what was found."""

    text: str
    holds: bool | None
    """None if there were too few samples to tell."""
    found: str

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "fails", None: "undecided"}[self.holds]


def page(
    title: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    charts: Sequence[Bars | Lines],
    claims: Sequence[Claim] = (),
) -> str:
    """Returns the page. All texts are escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    items = "".join(
        f'<li class="{one.verdict}">{one.verdict}: {escape(one.text)} ({escape(one.found)})</li>' for one in claims
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(note)}</p><ul>{items}</ul>"
        f"<table><tr>{head}</tr>{body}</table>{''.join(map(_chart, charts))}</html>\n"
    )


def _chart(chart: Bars | Lines) -> str:
    return f"<h2>{escape(chart.title)} ({escape(chart.unit)})</h2>" + (
        _bars(chart) if isinstance(chart, Bars) else _lines(chart)
    )


def _bars(chart: Bars) -> str:
    most = max((value for _, value in chart.values if value is not None), default=0.0) or 1.0
    bars = []
    for number, (label, value) in enumerate(chart.values):
        y = number * (_BAR_HEIGHT + 4)
        width = 0.0 if value is None else _BAR_WIDTH * value / most
        bars.append(
            f'<text x="0" y="{y + 16}">{escape(label)}</text>'
            f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" fill="#4a7ebb"/>'
            f'<text x="{_LABEL_WIDTH + width + 6:.1f}" y="{y + 16}">{escape(_text(value))}</text>'
        )
    height = len(chart.values) * (_BAR_HEIGHT + 4)
    total = _LABEL_WIDTH + _BAR_WIDTH + 90
    return f'<svg width="{total}" height="{height}">{"".join(bars)}</svg>'


def _lines(chart: Lines) -> str:
    points = [point for _, series in chart.series for point in series]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    parts = [f'<text x="0" y="14">{escape(_text(most_y))}</text>']
    for number, (name, series) in enumerate(chart.series):
        colour = _COLOURS[number % len(_COLOURS)]
        places = " ".join(
            f"{_MARGIN + _PLOT_WIDTH * x / most_x:.1f},{_PLOT_HEIGHT * (1 - y / most_y) + 4:.1f}" for x, y in series
        )
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{_MARGIN + _PLOT_WIDTH + 10}" y="{18 * number + 14}" fill="{colour}">{escape(name)}</text>'
        )
    base = _PLOT_HEIGHT + 4
    parts.append(f'<path d="M{_MARGIN},4 V{base} H{_MARGIN + _PLOT_WIDTH}" fill="none" stroke="#888"/>')
    parts.append(f'<text x="{_MARGIN}" y="{base + 18}">0 to {escape(_text(most_x))}: {escape(chart.x)}</text>')
    return f'<svg width="{_MARGIN + _PLOT_WIDTH + 240}" height="{base + 24}">{"".join(parts)}</svg>'


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
