"""Reads and writes the rows of turns, of their events, and of histories (checkpoints with token ids, and items).

Owns the SQL statements. Never opens a transaction and never checks a rule: the caller does both.
Invariant: this module adds rows of events and of histories, but never changes them. Every statement is limited to one
tenant.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from sqlalchemy import CTE, ColumnElement, Insert, Select, Table, Update, bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.contents.rows import RowOpener, row_opener, row_sealer
from graftwork.platform.database import Base, ReadSession, WriteSession
from graftwork.platform.encryption.repository import plain_characters
from graftwork.platform.ids import CheckpointId, ItemId, KeyId, SessionId, TurnId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.events import EventType, SessionEvent
from graftwork.sessions.core.items import OUTPUTS, Item, item_from_body
from graftwork.sessions.core.session import Turn, TurnStatus
from graftwork.sessions.core.transcript import Checkpoint, pack_token_ids, unpack_token_ids
from graftwork.sessions.store.tables import CheckpointRow, EventRow, HiddenItemRow, ItemRow, TurnRow

_ID_AND_BODY = (ItemRow.id, ItemRow.body)


def _table(row: type[Base]) -> Table:
    return cast("Table", row.__table__)


# Statements that every turn runs are built once, and over tables: SQLAlchemy takes several times as long to make one.
_INSERT_TURN, _INSERT_CHECKPOINT, _INSERT_ITEMS = (insert(_table(row)) for row in (TurnRow, CheckpointRow, ItemRow))
_FIND_TURN = select(TurnRow).where(TurnRow.id == bindparam("of_id"), TurnRow.tenant_id == bindparam("of_tenant"))


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a turn had delivered when its process died: the tokens of its prompt and of the stored part of its answer."""

    cache: Mapping[str, Any]
    """The prompt's tokens by cache tier, as the turn's first event has them."""
    answer_tokens: int


async def insert_turn(database: WriteSession, scope: TenantScope, turn: Turn) -> None:
    """Stores the row of a new turn."""
    row = {
        "id": turn.turn_id,
        "tenant_id": scope,
        "session_id": turn.session_id,
        "parent_id": turn.parent_id,
        "first_seq": turn.first_seq,
        "input": [item.body for item in turn.input],
        "created_at": turn.created_at,
        "made_with": turn.made_with,
        "key_id": turn.key_id,
        **_changing_columns(turn),
    }
    sealer = await row_sealer(database, scope)
    await database.execute(_INSERT_TURN, dict(sealer.sealed(TurnRow, row)))


async def update_turn(database: WriteSession, scope: TenantScope, turn: Turn) -> None:
    """Stores in the row of a turn how the turn ended.

    The output of the turn is not in this row: it is stored as items of the turn's checkpoint.
    """
    changed = _changing_columns(turn)
    await database.execute(_updating(tuple(changed)), {**changed, "of_id": turn.turn_id, "of_tenant": scope})


@cache
def _updating(names: tuple[str, ...]) -> Update:
    """Returns the statement that changes these columns of a turn. It is built once, for every turn runs it."""
    of_turn = (TurnRow.id == bindparam("of_id"), TurnRow.tenant_id == bindparam("of_tenant"))
    return update(_table(TurnRow)).where(*of_turn).values({name: bindparam(name) for name in names})


async def find_turn(database: ReadSession, scope: TenantScope, turn_id: str) -> Turn | None:
    """Finds one turn, without its output. Returns None if the turn does not exist."""
    row = await database.scalar(_FIND_TURN, {"of_id": turn_id, "of_tenant": scope})
    return None if row is None else turn_from_row(row, await row_opener(database, scope))


async def insert_events(database: WriteSession, events: Iterable[tuple[TenantScope, SessionEvent]], at: float) -> None:
    """Stores events with their numbers. Skips an event whose number is stored already.

    `at` is the present time in Unix seconds.
    """
    rows = list[Mapping[str, Any]]()
    for scope, event in events:
        row: dict[str, Any] = {
            "session_id": event.session_id,
            "seq": event.seq,
            "tenant_id": scope,
            "turn_id": event.turn_id,
            "type": event.type.value,
            "fields": dict(event.fields),
            "answer_tokens": event.answer_tokens,
            "at": at,
        }
        rows.append((await row_sealer(database, scope)).sealed(EventRow, row))
    await database.execute(_adding_events(database.get_bind().dialect.name), rows)


@cache
def _adding_events(dialect: str) -> Insert:
    """Returns the statement that adds events, unless they are stored."""
    return (sqlite.insert if dialect == "sqlite" else postgresql.insert)(_table(EventRow)).on_conflict_do_nothing()


async def list_events(
    database: ReadSession, scope: TenantScope, session_id: SessionId, after: int, limit: int
) -> tuple[SessionEvent, ...]:
    """Returns up to `limit` events of a session whose number is above `after`, in order."""
    statement = (
        select(EventRow)
        .where(EventRow.session_id == session_id, EventRow.tenant_id == scope, EventRow.seq > after)
        .order_by(EventRow.seq)
        .limit(limit)
    )
    opener = await row_opener(database, scope)
    return tuple(_event_from_row(row, opener) for row in await database.scalars(statement))


async def find_delivered(database: ReadSession, scope: TenantScope, turn: Turn) -> Delivered | None:
    """Finds what the stored events of a turn had delivered.

    Returns None if the events do not say that the engine has admitted the prompt.
    """
    mine = (EventRow.session_id == turn.session_id, EventRow.tenant_id == scope, EventRow.turn_id == turn.turn_id)
    created = select(EventRow.seq, EventRow.fields).where(*mine, EventRow.type == EventType.TURN_CREATED.value)
    found = (await database.execute(created)).first()
    if found is None:
        return None
    opener = await row_opener(database, scope)
    fields = opener.opened(EventRow, "fields", found.fields, turn.session_id, found.seq)
    if fields["cache"] is None:
        return None
    return Delivered(fields["cache"], await database.scalar(select(func.max(EventRow.answer_tokens)).where(*mine)) or 0)


def _changing_columns(turn: Turn) -> dict[str, Any]:
    return {
        "status": turn.status.value,
        "checkpoint_id": turn.checkpoint_id,
        "finish_reason": turn.finish_reason,
        "usage": turn.usage,
        "cache": turn.cache,
        "error": turn.error,
        "finished_at": turn.finished_at,
    }


def turn_from_row(row: TurnRow, opener: RowOpener) -> Turn:
    """Reads a turn, without its output. Raises InternalFailure if its content cannot be decrypted."""
    return Turn(
        turn_id=TurnId(row.id),
        session_id=SessionId(row.session_id),
        status=TurnStatus(row.status),
        parent_id=None if row.parent_id is None else CheckpointId(row.parent_id),
        first_seq=row.first_seq,
        input=tuple(item_from_body(body) for body in opener.opened(TurnRow, "input", row.input, row.id)),
        created_at=row.created_at,
        checkpoint_id=None if row.checkpoint_id is None else CheckpointId(row.checkpoint_id),
        finish_reason=row.finish_reason,
        usage=row.usage,
        cache=row.cache,
        error=row.error,
        finished_at=row.finished_at,
        made_with=opener.opened(TurnRow, "made_with", row.made_with, row.id),
        key_id=None if row.key_id is None else KeyId(row.key_id),
    )


def _event_from_row(row: EventRow, opener: RowOpener) -> SessionEvent:
    fields = opener.opened(EventRow, "fields", row.fields, row.session_id, row.seq)
    return SessionEvent(SessionId(row.session_id), TurnId(row.turn_id), row.seq, EventType(row.type), fields)


async def insert_checkpoint(
    database: WriteSession, scope: TenantScope, checkpoint: Checkpoint, items: Sequence[Item]
) -> None:
    """Stores a checkpoint, and the items that the checkpoint's turn added to the history."""
    sealer = await row_sealer(database, scope)
    row = {
        "id": checkpoint.checkpoint_id,
        "tenant_id": scope,
        "session_id": checkpoint.session_id,
        "parent_id": checkpoint.parent_id,
        "turn_id": checkpoint.turn_id,
        "depth": checkpoint.depth,
        "num_items": checkpoint.num_items,
        "num_answer_items": checkpoint.num_answer_items,
        "num_tokens": checkpoint.num_tokens,
        "token_ids": pack_token_ids(checkpoint.token_ids),
        "closed": checkpoint.closed,
        "awaits_tools": checkpoint.awaits_tools,
        "opening": checkpoint.opening,
        "created_at": checkpoint.created_at,
    }
    await database.execute(_INSERT_CHECKPOINT, dict(sealer.sealed(CheckpointRow, row)))
    first = checkpoint.num_items - len(items)
    if not items:
        return
    rows = [
        {
            "id": item.item_id,
            "tenant_id": scope,
            "checkpoint_id": checkpoint.checkpoint_id,
            "position": first + index,
            "type": item.type.value,
            "body": item.body,
        }
        for index, item in enumerate(items)
    ]
    await database.execute(_INSERT_ITEMS, [sealer.sealed(ItemRow, row) for row in rows])


async def hide_items(database: WriteSession, scope: TenantScope, checkpoint: Checkpoint, items: Sequence[Item]) -> None:
    """Hides items from the histories that have this checkpoint."""
    rows = [{"checkpoint_id": checkpoint.checkpoint_id, "item_id": item.item_id, "tenant_id": scope} for item in items]
    await database.execute(insert(HiddenItemRow), rows)


async def find_checkpoint(database: ReadSession, scope: TenantScope, checkpoint_id: str) -> Checkpoint | None:
    """Finds one checkpoint. Returns None if the checkpoint does not exist."""
    statement = select(CheckpointRow).where(CheckpointRow.id == checkpoint_id, CheckpointRow.tenant_id == scope)
    row = await database.scalar(statement)
    return None if row is None else _checkpoint_from_row(row, await row_opener(database, scope))


async def find_chain(database: ReadSession, scope: TenantScope, head_id: str) -> tuple[Checkpoint, ...]:
    """Finds the checkpoints of the history that ends at the checkpoint `head_id`, oldest first."""
    chain = _chain(scope, head_id)
    statement = select(CheckpointRow).join(chain, CheckpointRow.id == chain.c.id).order_by(CheckpointRow.depth)
    opener = await row_opener(database, scope)
    return tuple(_checkpoint_from_row(row, opener) for row in await database.scalars(statement))


async def is_in_chain(database: ReadSession, scope: TenantScope, head_id: str, checkpoint_id: str) -> bool:
    """Returns whether a checkpoint belongs to the history that ends at the checkpoint `head_id`."""
    chain = _chain(scope, head_id)
    found = await database.scalar(select(chain.c.id).where(chain.c.id == checkpoint_id))
    return found is not None


async def find_items(database: ReadSession, scope: TenantScope, checkpoint_id: str) -> tuple[Item, ...]:
    """Finds the items that the turn of one checkpoint added to the history, in order."""
    statement = (
        select(*_ID_AND_BODY)
        .where(ItemRow.checkpoint_id == checkpoint_id, ItemRow.tenant_id == scope)
        .order_by(ItemRow.position)
    )
    return await _items(database, scope, statement)


async def find_item_sizes(database: ReadSession, scope: TenantScope, item_ids: Sequence[str]) -> dict[ItemId, int]:
    """Finds the lengths, in characters of JSON, of the items of the tenant that have these ids, in any history."""
    size = plain_characters(database, ItemRow.body)
    found = await database.execute(select(ItemRow.id, size).where(*_named(scope, item_ids)))
    return {ItemId(item_id): characters for item_id, characters in found}


async def count_characters(database: ReadSession, scope: TenantScope, head_id: str) -> int:
    """Returns the length, in characters of JSON, of all items of the history that ends at the checkpoint `head_id`.

    Hidden items count too.
    """
    chain = _chain(scope, head_id)
    size = func.sum(plain_characters(database, ItemRow.body))
    return int(await database.scalar(select(size).join(chain, ItemRow.checkpoint_id == chain.c.id)) or 0)


async def find_items_by_id(database: ReadSession, scope: TenantScope, item_ids: Sequence[str]) -> tuple[Item, ...]:
    """Finds the items of the tenant that have these ids, in any history and in no order."""
    statement = select(*_ID_AND_BODY).where(*_named(scope, item_ids))
    return await _items(database, scope, statement)


def _named(scope: TenantScope, item_ids: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    return ItemRow.id.in_(item_ids), ItemRow.tenant_id == scope


async def find_item_in(
    database: ReadSession, scope: TenantScope, head_id: str, item_id: str, *, or_hidden: bool = False
) -> Item | None:
    """Finds one item of the history that ends at the checkpoint `head_id`. Returns None if it is not in there.

    If `or_hidden` is True, also finds an item that the history hides.
    """
    chain = _chain(scope, head_id)
    statement = select(*_ID_AND_BODY).join(chain, ItemRow.checkpoint_id == chain.c.id).where(ItemRow.id == item_id)
    found = await _items(database, scope, statement if or_hidden else statement.where(_is_visible(chain)))
    return found[0] if found else None


async def find_all_items(database: ReadSession, scope: TenantScope, head_id: str) -> tuple[Item, ...]:
    """Finds every item of the history that ends at the checkpoint `head_id`, oldest first. Leaves out hidden items."""
    chain = _chain(scope, head_id)
    statement = select(*_ID_AND_BODY).join(chain, ItemRow.checkpoint_id == chain.c.id).where(_is_visible(chain))
    return await _items(database, scope, statement.order_by(ItemRow.position))


async def find_outputs(database: ReadSession, scope: TenantScope, head_id: str) -> tuple[Item, ...]:
    """Finds every tool output of the history that ends at the checkpoint `head_id`, oldest first."""
    chain = _chain(scope, head_id)
    statement = (
        select(*_ID_AND_BODY)
        .join(chain, ItemRow.checkpoint_id == chain.c.id)
        .where(ItemRow.type.in_([kind.value for kind in OUTPUTS]))
        .order_by(ItemRow.position)
    )
    return await _items(database, scope, statement)


async def list_items(database: ReadSession, scope: TenantScope, head_id: str, page: PageRequest) -> Page[Item]:
    """Reads one page of the items of the history that ends at the checkpoint `head_id`.

    Leaves out hidden items. If `page.after` is not the id of an item of this history, hidden or not, it is ignored, and
    the first page is read.
    """
    chain = _chain(scope, head_id)
    ascending = page.order is Order.ASCENDING
    statement = select(*_ID_AND_BODY).join(chain, ItemRow.checkpoint_id == chain.c.id).where(_is_visible(chain))
    if page.after is not None:
        within = select(ItemRow.position).join(chain, ItemRow.checkpoint_id == chain.c.id)
        position = await database.scalar(within.where(ItemRow.id == page.after))
        if position is not None:
            statement = statement.where(ItemRow.position > position if ascending else ItemRow.position < position)
    statement = statement.order_by(ItemRow.position if ascending else ItemRow.position.desc())
    return cut(await _items(database, scope, statement.limit(page.limit + 1)), page)


async def _items(database: ReadSession, scope: TenantScope, statement: Select[str, Any]) -> tuple[Item, ...]:
    """Returns the items that a statement over `_ID_AND_BODY` finds. Raises InternalFailure."""
    opener = await row_opener(database, scope)
    found = (await database.execute(statement)).all()
    return tuple(item_from_body(opener.opened(ItemRow, "body", body, item_id)) for item_id, body in found)


def _chain(scope: TenantScope, head_id: str) -> CTE:
    """Returns the ids of a history's checkpoints, from its latest checkpoint back to its first."""
    head = (
        select(CheckpointRow.id, CheckpointRow.parent_id)
        .where(CheckpointRow.id == head_id, CheckpointRow.tenant_id == scope)
        .cte("chain", recursive=True)
    )
    parents: Any = select(CheckpointRow.id, CheckpointRow.parent_id).join(head, CheckpointRow.id == head.c.parent_id)
    return head.union_all(parents)


def _is_visible(chain: CTE) -> ColumnElement[bool]:
    """Returns the SQL condition for items that no checkpoint of the history hides."""
    hidden = select(HiddenItemRow.item_id).join(chain, HiddenItemRow.checkpoint_id == chain.c.id)
    return ItemRow.id.not_in(hidden)


def _checkpoint_from_row(row: CheckpointRow, opener: RowOpener) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=CheckpointId(row.id),
        session_id=SessionId(row.session_id),
        parent_id=None if row.parent_id is None else CheckpointId(row.parent_id),
        turn_id=TurnId(row.turn_id),
        depth=row.depth,
        num_items=row.num_items,
        num_answer_items=row.num_answer_items,
        num_tokens=row.num_tokens,
        token_ids=unpack_token_ids(opener.opened(CheckpointRow, "token_ids", row.token_ids, row.id)),
        closed=row.closed,
        awaits_tools=row.awaits_tools,
        created_at=row.created_at,
        opening=row.opening,
    )
