"""Draws `graftwork top` with Textual: tables of engines, tenants, adapters and sessions that follow a server.

Owns what is shown: the pane, the order, the text that rows must have, the page. Never computes a figure: `panes.py` does.
Invariant: a lost server changes nothing on the screen but the status line; the tables go on when it is back.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from graftwork.api.cli.top.panes import ENGINES, PANES, TENANTS, Pane, details, plain, totals
from graftwork.api.cli.top.table import Table
from graftwork.api.sdk.transport.errors import APIConnectionError, APIError, ServerError
from graftwork.platform.answers.overview import Overview

Follow = Callable[[dict[str, Any]], AsyncGenerator[Overview, None]]
"""A function that takes the parameters of an overview, and yields its snapshots until the server ends the stream."""
TALL = 45
"""From so many lines on, all tables are on the screen at once."""
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 8.0
"""The seconds before a lost server is asked again, and the most that they become."""
KEYS = "1-4 table  s order  / find  n b page  enter details  p pause  q quit"


class Details(ModalScreen[None]):
    """All that is known of one row, as long as it is there."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,q", "dismiss", "Back")]
    CSS = "Details {align: center middle} #facts {width: 76; height: auto; max-height: 90%; border: round $accent}"

    def __init__(self, pane: Pane, key: str, overview: Overview) -> None:
        super().__init__()
        self._pane = pane
        self._key = key
        self._facts = Static(markup=False)
        self.show(overview)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="facts"):
            yield self._facts

    def show(self, overview: Overview) -> None:
        """Shows the row as it is in `overview`; the latest known facts if the row is no longer there."""
        for row in self._pane.rows(overview):
            if self._pane.key(row) == self._key:
                self._facts.update(details(row, overview))


@dataclass(frozen=True, slots=True)
class View:
    """What `graftwork top` shows first."""

    sort: str = "activity"
    find: str = ""
    rows: int = 50
    """The most rows of a table."""


class Top(App[None]):
    """The program. It ends with `q`, or when the server refuses the key; then `refusal` is the error."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen {layout: vertical}
    #totals, #status {height: 1; text-style: bold}
    #status {text-style: dim}
    Table {height: 1fr}
    Table.folded {display: none}
    #find {display: none; height: 1; border: none; padding: 0}
    #find.asked {display: block}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("1", "pane(0)", "Engines"),
        ("2", "pane(1)", "Tenants"),
        ("3", "pane(2)", "Adapters"),
        ("4", "pane(3)", "Sessions"),
        ("s", "sort", "Order"),
        ("slash", "find", "Find"),
        ("escape", "show_all", "Show all"),
        ("n", "page(1)", "Next page"),
        ("b", "page(-1)", "Page before"),
        ("p", "pause", "Pause"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, follow: Follow, address: str, view: View) -> None:
        """`follow` yields snapshots of the server at `address`."""
        super().__init__()
        self.refusal: APIError | None = None
        self._follow = follow
        self._address = address
        self._rows = view.rows
        self._pane = TENANTS
        self._sorts = {pane.name: view.sort if view.sort in pane.sorts else next(iter(pane.sorts)) for pane in PANES}
        self._find = view.find
        self._page = 0
        self._is_paused = False
        self._problem = "connecting"
        self._status = ""
        self._overview: Overview | None = None
        self._changed = asyncio.Event()
        self._tables = {pane.name: Table(pane) for pane in PANES}

    def compose(self) -> ComposeResult:
        yield Static(id="totals", markup=False)
        yield from self._tables.values()
        yield Input(placeholder="name or id", id="find")
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        self._arrange()
        self._tell()
        self.run_worker(self._watch(), exclusive=True)

    def on_resize(self, _: Resize) -> None:
        self._arrange()

    # ---- following --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follows the server, again and again, until it refuses the key."""
        waits = FIRST_WAIT_S
        while True:
            self._changed.clear()
            following = asyncio.create_task(self._read())
            changing = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({following, changing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                following.cancel()
                changing.cancel()
            outcome, _ = await asyncio.gather(following, changing, return_exceptions=True)
            if self._changed.is_set():
                continue
            if isinstance(outcome, APIError) and not isinstance(outcome, APIConnectionError | ServerError):
                self.refusal = outcome
                self.exit()
                return
            waits = FIRST_WAIT_S if not self._problem else min(2 * waits, MOST_WAIT_S)
            self._problem = f"no answer from {self._address}; trying again"
            self._tell()
            await asyncio.sleep(waits)

    async def _read(self) -> None:
        async for overview in self._follow(self._query()):
            self._problem = ""
            if not self._is_paused:
                self.take(overview)

    def _query(self) -> dict[str, Any]:
        sort = self._sorts[self._pane.name] if self._pane.sorts[self._sorts[self._pane.name]] is None else "activity"
        query: dict[str, Any] = {"rows": self._rows, "sort": sort}
        if self._find:
            query["find"] = self._find
        if self._page and self._pane is not ENGINES:
            query[self._pane.name] = self._page * self._rows
        return query

    def take(self, overview: Overview) -> None:
        """Shows a snapshot."""
        self._overview = overview
        self.screen_stack[0].query_one("#totals", Static).update(totals(overview), layout=False)
        for table in self._tables.values():
            if not table.has_class("folded"):
                table.show(overview, self._sorts[table.pane.name])
        if isinstance(self.screen, Details):
            self.screen.show(overview)
        self._tell()

    def _tell(self) -> None:
        """Writes the status line."""
        parts = [self._problem, "paused" if self._is_paused else "", f"order: {self._sorts[self._pane.name]}"]
        if self._find:
            parts.append(f"find: {plain(self._find)}")
        if self._page:
            parts.append(f"page {self._page + 1}")
        status = f"[{self._pane.name}] " + "  ".join(part for part in parts if part)
        line = f"{status}  | {KEYS}"
        if line != self._status:
            self._status = line
            self.screen_stack[0].query_one("#status", Static).update(line, layout=False)

    def _arrange(self) -> None:
        """Shows all tables on a tall terminal, else the chosen one."""
        for table in self._tables.values():
            table.set_class(self.size.height < TALL and table.pane is not self._pane, "folded")
        if not self.query_one("#find", Input).has_focus:
            self._tables[self._pane.name].focus()
        if self._overview is not None:
            self.take(self._overview)

    # ---- keys -------------------------------------------------------------------------------------------------

    def action_pane(self, number: int) -> None:
        self._pane, self._page = PANES[number], 0
        self._arrange()
        self._ask_again()

    def action_sort(self) -> None:
        sorts = [*self._pane.sorts]
        place = sorts.index(self._sorts[self._pane.name])
        self._sorts[self._pane.name] = sorts[(place + 1) % len(sorts)]
        if self._overview is not None:
            self.take(self._overview)
        self._ask_again()

    def action_find(self) -> None:
        field = self.query_one("#find", Input)
        field.add_class("asked")
        field.focus()

    def action_show_all(self) -> None:
        field = self.query_one("#find", Input)
        field.value, self._find, self._page = "", "", 0
        self._leave_field(field)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._find, self._page = event.value.strip(), 0
        self._leave_field(event.input)

    def _leave_field(self, field: Input) -> None:
        field.remove_class("asked")
        self._tables[self._pane.name].focus()
        self._ask_again()

    def action_page(self, step: int) -> None:
        self._page = max(self._page + step, 0)
        self._ask_again()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._tell()

    def on_table_chosen(self, event: Table.Chosen) -> None:
        if self._overview is not None:
            self.push_screen(Details(event.pane, event.key, self._overview))

    def _ask_again(self) -> None:
        """Follows with the present order, text and page."""
        self._changed.set()
        self._tell()
