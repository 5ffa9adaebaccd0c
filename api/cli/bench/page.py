"""Writes the results of a measurement as one HTML file without scripts: a table, and bars drawn in SVG.

Owns how the page looks. Never computes a figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_BAR_WIDTH, _BAR_HEIGHT, _LABEL_WIDTH = 420, 22, 220
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child"
    "{text-align:left}.holds{color:#176b3a}.fails{color:#b3261e}svg text{font:13px system-ui,sans-serif}"
)


@dataclass(frozen=True, slots=True)
class Bars:
    """One chart: a bar for each label. A value of None has no bar."""

    title: str
    unit: str
    values: Sequence[tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that the measurement checks, and what was found."""

    text: str
    holds: bool
    found: str


def page(
    title: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    charts: Sequence[Bars],
    claims: Sequence[Claim] = (),
) -> str:
    """Returns the page. All texts are escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    items = "".join(
        f'<li class="{"holds" if one.holds else "fails"}">{"holds" if one.holds else "fails"}: '
        f"{escape(one.text)} ({escape(one.found)})</li>"
        for one in claims
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(note)}</p><ul>{items}</ul>"
        f"<table><tr>{head}</tr>{body}</table>{''.join(map(_chart, charts))}</html>\n"
    )


def _chart(chart: Bars) -> str:
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
    return f'<h2>{escape(chart.title)} ({escape(chart.unit)})</h2><svg width="{total}" height="{height}">{"".join(bars)}</svg>'


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
