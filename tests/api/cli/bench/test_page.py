"""Tests of the page on which a measurement is shown."""

from html.parser import HTMLParser

from graftwork.api.cli.bench.page import Bars, Claim, Lines, page


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.widths: list[float] = []
        self.tags: set[str] = set()
        self.lines: list[list[tuple[float, float]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "rect":
            self.widths.append(float(dict(attrs)["width"] or 0))
        if tag == "polyline":
            places = (dict(attrs)["points"] or "").split()
            self.lines.append([(float(x), float(y)) for x, y in (place.split(",") for place in places)])

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    return reader


def test_the_page_shows_every_cell_and_verdict_as_text() -> None:
    """Cells, claims and labels are on the page as they are, also if they contain markup, which is not run."""
    claim = Claim("p99 <= 2 x alone", False, "9 against 4")
    html = page(
        "T", "<script>alert(1)</script>", ("tenant",), [("<b>a</b>",)], [Bars("B", "ms", [("x & y", 1.0)])], [claim]
    )

    reader = read(html)

    assert {"<script>alert(1)</script>", "<b>a</b>", "x & y"} <= set(reader.texts)
    assert any(text == "fails: p99 <= 2 x alone (9 against 4)" for text in reader.texts)
    assert not reader.tags & {"script", "b", "link", "img"}


def test_bars_are_as_long_as_their_values() -> None:
    """The widths of the bars are in the ratio of their values, and a missing value has no bar."""
    html = page("T", "", (), [], [Bars("B", "s", [("a", 4.0), ("b", 1.0), ("c", None)])])

    longest, quarter, none = read(html).widths

    assert (quarter / longest, none) == (0.25, 0.0)


def test_lines_rise_with_their_values() -> None:
    """Each series is a line whose points are in the ratio of their values, over axes that begin at 0."""
    html = page("T", "", (), [], [Lines("L", "ms", "turn", [("a", [(0, 0), (2, 4.0)]), ("b", [(1, 1.0)])])])

    (origin, top), (quarter,) = read(html).lines

    assert (origin[1] - quarter[1]) / (origin[1] - top[1]) == 0.25
    assert (quarter[0] - origin[0]) / (top[0] - origin[0]) == 0.5
    assert {"a", "b"} <= set(read(html).texts)
