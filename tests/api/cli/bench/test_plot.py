"""Tests of the charts in a PNG file."""

import struct
from pathlib import Path

import pytest

from graftwork.api.cli.bench.page import Bars, Lines
from graftwork.api.cli.bench.plot import write_png

pytest.importorskip("matplotlib")


def size_of(path: Path) -> tuple[int, int]:
    """The width and the height that a PNG file says it has."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_each_chart_adds_to_the_height(tmp_path: Path) -> None:
    """A file with bars and lines is a PNG of the same width as one with the bars alone, and higher; None is no bar."""
    bars = Bars("B", "ms", [("a & b", 4.0), ("c", None)])
    lines = Lines("L", "ms", "turn", [("p50", [(1, 2.0), (2, 3.0)])])

    write_png(tmp_path / "one.png", "T", [bars])
    write_png(tmp_path / "two.png", "T", [bars, lines])

    one, two = size_of(tmp_path / "one.png"), size_of(tmp_path / "two.png")
    assert one[0] == two[0] > 0
    assert two[1] > one[1] > 0
