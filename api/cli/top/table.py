"""Draws one table of `graftwork top`, a line of text for each row.

Owns the rows, the cursor, and which rows are on the screen. A line is one piece of text, and is drawn again only if it has
changed: a snapshot a second of rows that change places costs a terminal of 24 lines little more than their text.
Never computes a figure: `panes.py` does.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from textual.binding import BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from graftwork.api.cli.top.panes import Cells, Pane
from graftwork.platform.answers.overview import Overview

HEADING_LINES = 1
_END = 1 << 30
"""More rows than any table has."""


class Table(Widget, can_focus=True):
    """One pane. The cursor stays on its row while rows change their places."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--heading", "table--cursor"}
    DEFAULT_CSS = """
    Table .table--heading {text-style: bold; color: $accent}
    Table .table--cursor {text-style: reverse}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "move(-1)", "Up"),
        ("down", "move(1)", "Down"),
        ("pageup", "move_page(-1)", "Page up"),
        ("pagedown", "move_page(1)", "Page down"),
        ("home", f"move(-{_END})", "First"),
        ("end", f"move({_END})", "Last"),
        ("enter", "choose", "Details"),
    ]

    class Chosen(Message):
        """Enter or a second click was pressed on a row."""

        def __init__(self, pane: Pane, key: str) -> None:
            super().__init__()
            self.pane = pane
            self.key = key

    def __init__(self, pane: Pane) -> None:
        super().__init__(id=pane.name)
        self.pane = pane
        self.cursor_row = 0
        self._first = 0
        """The row below the heading: rows before it are above the screen."""
        self._rows: Sequence[Any] = ()
        self._overview: Overview | None = None
        self._heading = "".join(column.heading for column in pane.columns)
        self._drawn: dict[int, str] = {}
        """What was asked to be drawn of each line, with a mark for the cursor."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def cells_at(self, row: int) -> Cells:
        """Returns the texts of a row that is there."""
        assert self._overview is not None
        return self.pane.cells(self._rows[row], self._overview)

    def show(self, overview: Overview, sort: str) -> None:
        """Shows the rows of an overview in an order of the pane."""
        selected = self._key_at(self.cursor_row)
        self._rows, self._overview = self.pane.sorted_rows(overview, sort), overview
        keys = [self.pane.key(row) for row in self._rows]
        self._move_to(keys.index(selected) if selected in keys else self.cursor_row)

    def render_line(self, y: int) -> Strip:
        """Returns one line of the table, as wide as the widget."""
        width, text = self.size.width, self._text(y)
        style = self.rich_style
        if y < HEADING_LINES:
            style = self.get_component_rich_style("table--heading")
        elif y - HEADING_LINES + self._first == self.cursor_row and text:
            style = self.get_component_rich_style("table--cursor")
        return Strip([Segment(text, style)]).adjust_cell_length(width, style).crop(0, width)

    def _text(self, y: int) -> str:
        if y < HEADING_LINES:
            return self._heading
        row = y - HEADING_LINES + self._first
        return "".join(self.cells_at(row)) if row < len(self._rows) else ""

    def _redraw(self) -> None:
        """Draws the lines that differ from those on the screen."""
        cursor = self.cursor_row - self._first + HEADING_LINES
        lines = {y: ("›" if y == cursor else " ") + self._text(y) for y in range(HEADING_LINES, self.size.height)}
        changed = [y for y, text in lines.items() if self._drawn.get(y) != text]
        self._drawn = lines
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _move_to(self, row: int) -> None:
        """Moves the cursor to a row, or the nearest that is there, and the rows so far that it is on the screen."""
        room = max(self.size.height - HEADING_LINES, 1)
        self.cursor_row = max(min(row, len(self._rows) - 1), 0)
        first = min(max(self._first, self.cursor_row - room + 1), self.cursor_row)
        self._first = max(min(first, len(self._rows) - room), 0)
        self._redraw()

    def _key_at(self, row: int) -> str | None:
        return self.pane.key(self._rows[row]) if 0 <= row < len(self._rows) else None

    # ---- keys and the mouse -----------------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        self._move_to(self.cursor_row + step)

    def action_move_page(self, step: int) -> None:
        self._move_to(self.cursor_row + step * max(self.size.height - HEADING_LINES, 1))

    def action_choose(self) -> None:
        key = self._key_at(self.cursor_row)
        if key is not None:
            self.post_message(self.Chosen(self.pane, key))

    def on_click(self, event: Click) -> None:
        row = event.y - HEADING_LINES + self._first
        if event.y < HEADING_LINES or row >= len(self._rows):
            return
        if row == self.cursor_row:
            self.action_choose()
        else:
            self._move_to(row)

    def on_mouse_scroll_down(self, _: MouseScrollDown) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self, _: MouseScrollUp) -> None:
        self.action_move(-1)

    def on_resize(self, _: Resize) -> None:
        self._drawn = {}
        self._move_to(self.cursor_row)
