"""Tests of sessions in the database."""

import json

import pytest

from graftwork.platform.database import Database
from graftwork.platform.errors import PayloadTooLarge
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.items import Item, message
from graftwork.sessions.core.session import SessionKind, SessionStatus
from graftwork.sessions.service import NewSession
from graftwork.sessions.store.histories import HistoryLimits
from graftwork.sessions.store.session_store import SessionStore
from tests.sessions.session_process import SessionProcess, new_principal


async def test_sessions_are_counted_by_status_over_all_tenants(database: Database) -> None:
    """The counts hold what tenants list as sessions: no conversations, and no response chains."""
    process, first, second = SessionProcess(database), new_principal(), new_principal()
    sessions = SessionStore(database, process.clock, retention_s=60.0)
    closed = await process.session(first)
    await process.service.close_session(first, closed.session_id)
    suspended = await process.session(second)
    await process.service.suspend(second, suspended.session_id)
    for principal in (first, second):
        await process.session(principal)
    for kind in (SessionKind.CONVERSATION, SessionKind.RESPONSES):
        await process.service.create(first, NewSession("tiny", kind=kind))

    counts = await sessions.count_by_status()

    assert counts == {SessionStatus.CLOSED: 1, SessionStatus.SUSPENDED: 1, SessionStatus.IDLE: 2}


def characters(items: list[Item]) -> int:
    return sum(len(json.dumps(item.body)) for item in items)


@pytest.mark.parametrize("limited_by", ["items", "characters"])
async def test_what_clients_add_to_a_history_is_bounded(database: Database, limited_by: str) -> None:
    """Items up to the limit are stored; one more, even after a deletion, is refused, and leaves the history as it was."""
    process, me = SessionProcess(database), new_principal()
    items = [message("user", f"Number {number}") for number in range(4)]
    num_items, num_characters = (4, 10_000) if limited_by == "items" else (100, characters(items) + 40)
    limits = HistoryLimits(num_items, num_characters)
    sessions = SessionStore(database, process.clock, 60.0, limits)
    made = await process.service.create(me, NewSession("tiny", kind=SessionKind.CONVERSATION, items=tuple(items[:2])))

    await sessions.add_items(me.scope(), made, items[2:])
    await sessions.hide_item(me.scope(), made.session_id, items[0].item_id)
    before = await sessions.load(me.scope(), made.session_id)
    with pytest.raises(PayloadTooLarge, match="another conversation") as refused:
        await sessions.add_items(me.scope(), before, [message("user", "One more " * 40)])

    after = await sessions.load(me.scope(), made.session_id)
    page = await sessions.list_items(me.scope(), after, PageRequest(order=Order.ASCENDING))
    assert (refused.value.code, refused.value.param) == ("conversation_too_long", "items")
    assert after == before
    assert [item.item_id for item in page.items] == [item.item_id for item in items[1:]]
