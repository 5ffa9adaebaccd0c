"""Tests of the screen of `graftwork top`, driven by keys."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Input, Static

from graftwork.api.cli.top.screen import Details, Top, View
from graftwork.api.cli.top.table import Table
from graftwork.api.sdk.transport.errors import APIConnectionError, AuthenticationError
from graftwork.platform.answers.overview import Overview
from tests.api.cli.top.overviews import overview, tenant

SMALL, TALL = (80, 24), (100, 60)


class Server:
    """A server that answers what the test puts in, and remembers what it was asked."""

    def __init__(self) -> None:
        self.queries: list[dict[str, Any]] = []
        self.snapshots: asyncio.Queue[Overview | Exception] = asyncio.Queue()
        self.asked = asyncio.Event()

    async def follow(self, query: dict[str, Any]) -> AsyncGenerator[Overview, None]:
        self.queries.append(query)
        self.asked.set()
        while True:
            snapshot = await self.snapshots.get()
            if isinstance(snapshot, Exception):
                self.snapshots.task_done()
                raise snapshot
            yield snapshot
            self.snapshots.task_done()


@pytest.fixture
def server() -> Server:
    return Server()


def program(server: Server) -> Top:
    return Top(server.follow, "http://gateway.test", View())


async def settle(pilot: Pilot[None], server: Server, *snapshots: Overview) -> None:
    """Sends snapshots, and waits until the screen has taken them."""
    for snapshot in snapshots:
        server.snapshots.put_nowait(snapshot)
    await server.snapshots.join()
    await pilot.pause()


def text_of(top: Top, name: str) -> str:
    return str(top.query_one(name, Static).content)


def rows_of(top: Top, name: str) -> list[str]:
    table = top.query_one(f"#{name}", Table)
    return [table.cells_at(number)[0].strip() for number in range(table.num_rows)]


async def test_tenants_are_shown_first(server: Server) -> None:
    """The first table is that of tenants; the others are folded on a small terminal, and shown on a tall one."""
    for size, num_shown in ((SMALL, 1), (TALL, 4)):
        top = program(server)
        async with top.run_test(size=size) as pilot:
            await settle(pilot, server, overview())

            assert rows_of(top, "tenants") == ["Acme"]
            assert len([table for table in top.query(Table) if table.display]) == num_shown
            assert "running 2" in text_of(top, "#totals")


async def test_keys_choose_tables(server: Server) -> None:
    """1 to 4 choose a table."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview())
        for key, name, first in (
            ("1", "engines", "engine-0"),
            ("3", "adapters", "support@3"),
            ("4", "sessions", "ses_01hzx"),
        ):
            await pilot.press(key)
            await pilot.pause()

            assert rows_of(top, name) == [first]
            assert [table.id for table in top.query(Table) if table.display] == [name]


async def test_s_asks_the_server_for_the_next_order(server: Server) -> None:
    """The order of tenants is the server's: the next snapshot is asked in it."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview())
        server.asked.clear()
        await pilot.press("s")
        await server.asked.wait()

    assert [query["sort"] for query in server.queries] == ["activity", "running"]


async def test_a_text_is_found_by_the_server(server: Server) -> None:
    """`/` asks for a text, enter sends it, escape shows all again; keys typed into the field choose no table."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview())
        server.asked.clear()
        await pilot.press("slash", "a", "4", "enter")
        await server.asked.wait()
        await pilot.pause()
        assert "find: a4" in text_of(top, "#status")
        server.asked.clear()
        await pilot.press("escape")
        await server.asked.wait()
        assert not top.query_one("#find", Input).has_focus

    assert [query.get("find") for query in server.queries] == [None, "a4", None]


async def test_pages_are_turned(server: Server) -> None:
    """n asks for the next rows of the chosen table, b for those before."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        for key in ("n", "n", "b", "4", "n"):
            await server.asked.wait()
            server.asked.clear()
            await pilot.press(key)
        await server.asked.wait()

    assert [query.get("tenants", 0) for query in server.queries[:4]] == [0, 50, 100, 50]
    assert server.queries[-1]["sessions"] == 50


async def test_the_cursor_stays_on_its_row(server: Server) -> None:
    """When rows change their order, the cursor moves with its row; enter shows that row's details as they change."""
    top = program(server)
    first, second = [tenant(one) for one in range(3)], [tenant(0), tenant(2, waiting=77), tenant(1)]
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview(first))
        await pilot.press("down", "down")
        await settle(pilot, server, overview(second))
        assert top.query_one("#tenants", Table).cursor_row == 1
        await pilot.press("enter")
        await pilot.pause()
        await settle(pilot, server, overview([tenant(0), tenant(2, waiting=88)]))

        assert isinstance(top.screen, Details)
        assert "88" in str(top.screen.query_one("#facts Static", Static).content)
        await pilot.press("escape")
        assert not isinstance(top.screen, Details)


async def test_unchanged_lines_are_left_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot draws only the lines that differ; one that repeats the last one draws none."""
    drawn: list[Region] = []
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview([tenant(0), tenant(1)]))
        monkeypatch.setattr(Table, "refresh", lambda self, *regions, **_: drawn.extend(regions))
        await settle(pilot, server, overview([tenant(0), tenant(1, waiting=5)]))
        await settle(pilot, server, overview([tenant(0), tenant(1, waiting=5)]))

    assert [(region.y, region.height) for region in drawn] == [(2, 1)]


async def test_the_cursor_moves_through_more_rows_than_fit(server: Server) -> None:
    """Arrows, page keys, home, end and the mouse move the cursor; its row is always on the screen, and the heading too."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview([tenant(number) for number in range(50)]))
        table = top.query_one("#tenants", Table)
        room = table.size.height - 1
        for keys, row in (
            (["up"], 0),
            (["end"], 49),
            (["down"], 49),
            (["pageup"], 49 - room),
            (["home"], 0),
            (["pagedown"], room),
            (["down"] * 2, room + 2),
        ):
            await pilot.press(*keys)
            lines = [table.render_line(y).text for y in range(table.size.height)]

            assert table.cursor_row == row
            assert lines[0].startswith("TENANT")
            assert any(line.startswith(f"Tenant {row:02}") for line in lines)
        await pilot.click(table, offset=(3, 1))
        assert table.cursor_row == 3
        await settle(pilot, server, overview([tenant(0), tenant(1)]))
        assert table.cursor_row == 1
        assert [table.render_line(y).text.strip() for y in (3, room)] == ["", ""]


async def test_pause_holds_the_screen(server: Server) -> None:
    """While it is paused, the tables stay; then the next snapshot is shown."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview([tenant(0)]))
        await pilot.press("p")
        await settle(pilot, server, overview([tenant(1)]))
        assert rows_of(top, "tenants") == ["Tenant 00"]
        await pilot.press("p")
        await settle(pilot, server, overview([tenant(2)]))
        assert rows_of(top, "tenants") == ["Tenant 02"]


async def test_a_lost_server_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables stay while nobody answers, the status line says so, and the screen goes on when the server is back."""
    monkeypatch.setattr("graftwork.api.cli.top.screen.FIRST_WAIT_S", 0.0)
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview([tenant(0)]))
        server.asked.clear()
        server.snapshots.put_nowait(APIConnectionError("gone", code="dropped"))
        await server.asked.wait()
        assert "no answer from http://gateway.test" in text_of(top, "#status")
        assert rows_of(top, "tenants") == ["Tenant 00"]
        await settle(pilot, server, overview([tenant(1)]))
        assert rows_of(top, "tenants") == ["Tenant 01"]
        assert "no answer" not in text_of(top, "#status")


async def test_a_refused_key_ends_the_program(server: Server) -> None:
    """A key that the server refuses ends the program with the server's error."""
    refusal = AuthenticationError("The key is revoked.", code="invalid_key")
    top = program(server)
    async with top.run_test(size=SMALL):
        server.snapshots.put_nowait(refusal)
        await server.snapshots.join()

    assert top.refusal is refusal


async def test_hostile_names_draw_nothing_else(server: Server) -> None:
    """A name with terminal commands and markup is text in its cell and in the details."""
    top = program(server)
    async with top.run_test(size=SMALL) as pilot:
        await settle(pilot, server, overview([tenant(0, name="[bold]\x1b[2J\u202eevil")]))
        await pilot.press("enter")
        await pilot.pause()

        assert rows_of(top, "tenants") == ["[bold]·[2J·evil"]
        assert "[bold]·[2J·evil" in str(top.screen.query_one("#facts Static", Static).content)
