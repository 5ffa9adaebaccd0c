"""Reads the turns of a session page by page, with their outputs.

Owns two SQL statements, each limited to one tenant. Never changes anything.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from sqlalchemy import select

from graftwork.platform.contents.rows import row_opener
from graftwork.platform.database import Database, ReadSession
from graftwork.platform.ids import SessionId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.items import Item, item_from_body
from graftwork.sessions.core.session import Turn
from graftwork.sessions.store.tables import ItemRow, TurnRow
from graftwork.sessions.store.turn_rows import turn_from_row


class TurnLists:
    """Reads pages of turns. A turn's id sorts by the time of its beginning."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, scope: TenantScope, session_id: SessionId, page: PageRequest) -> Page[Turn]:
        """Returns one page of the turns that the session itself has run, and not those that it shares as a fork."""
        ascending = page.order is Order.ASCENDING
        statement = select(TurnRow).where(TurnRow.session_id == session_id, TurnRow.tenant_id == scope)
        if page.after is not None:
            statement = statement.where(TurnRow.id > page.after if ascending else TurnRow.id < page.after)
        statement = statement.order_by(TurnRow.id if ascending else TurnRow.id.desc()).limit(page.limit + 1)
        async with self._database.read() as database:
            opener = await row_opener(database, scope)
            turns = [turn_from_row(row, opener) for row in await database.scalars(statement)]
            ends = {str(turn.checkpoint_id) for turn in turns if turn.checkpoint_id is not None}
            items = await _items_of(database, scope, ends)
        return cut([replace(turn, output=_output(turn, items)) for turn in turns], page)


def _output(turn: Turn, items: dict[str, list[Item]]) -> tuple[Item, ...]:
    """Returns what follows the turn's input among the items of its checkpoint."""
    return tuple(items.get(str(turn.checkpoint_id), [])[len(turn.input) :])


async def _items_of(
    database: ReadSession, scope: TenantScope, checkpoint_ids: Collection[str]
) -> dict[str, list[Item]]:
    statement = (
        select(ItemRow.id, ItemRow.checkpoint_id, ItemRow.body)
        .where(ItemRow.checkpoint_id.in_(checkpoint_ids), ItemRow.tenant_id == scope)
        .order_by(ItemRow.position)
    )
    found, opener = defaultdict[str, list[Item]](list), await row_opener(database, scope)
    for item_id, checkpoint_id, body in (await database.execute(statement)).all():
        found[checkpoint_id].append(item_from_body(opener.opened(ItemRow, "body", body, item_id)))
    return found
