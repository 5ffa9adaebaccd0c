"""Contains the SQL statements over batches and their answers. Never commits: the caller that opened the session does.

Invariant: each statement reads or changes rows of one tenant only, except those for the gateways that run the batches of
all tenants: `find_free`, `claim`, `find_claimed`, `release` and `find_old`.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, cast

from sqlalchemy import ColumnElement, Select, delete, not_, select, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.batches.batch import Batch, BatchForm, BatchStatus, BatchUsage, LineOutcome
from graftwork.platform.batches.tables import BatchAnswerRow, BatchRow
from graftwork.platform.contents.rows import RowOpener, row_opener, row_sealer
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.gateways import repository as gateways
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.repository import insert_once

_USAGE = tuple(field.name for field in fields(BatchUsage))
_CHANGED = {"synchronize_session": False}


async def add(session: WriteSession, batch: Batch) -> None:
    values = asdict(batch)
    values |= values.pop("usage") | {"errors": list(batch.errors) or None}
    sealer = await row_sealer(session, batch.tenant_id)
    session.add(BatchRow(**sealer.sealed(BatchRow, values)))
    await session.flush()


async def find(session: ReadSession, scope: TenantScope, batch_id: str, *, lock: bool = False) -> Batch | None:
    statement = _of(scope).where(BatchRow.id == batch_id)
    row = await session.scalar(statement.with_for_update() if lock else statement)
    return _whole(row, await row_opener(session, scope)) if row else None


async def page(session: ReadSession, scope: TenantScope, form: BatchForm, request: PageRequest) -> Page[Batch]:
    """Returns one page of the tenant's batches in one form."""
    statement = _of(scope).where(BatchRow.form == form)
    is_ascending = request.order is Order.ASCENDING
    if request.after is not None:
        statement = statement.where(BatchRow.id > request.after if is_ascending else BatchRow.id < request.after)
    by = BatchRow.id.asc() if is_ascending else BatchRow.id.desc()
    rows = await session.scalars(statement.order_by(by).limit(request.limit + 1))
    opener = await row_opener(session, scope)
    return cut([_whole(row, opener) for row in rows.all()], request)


async def change(session: WriteSession, scope: TenantScope, batch_id: str, values: Mapping[str, Any]) -> None:
    mine = update(BatchRow).where(BatchRow.tenant_id == scope, BatchRow.id == batch_id)
    await session.execute(mine.values(**values).execution_options(**_CHANGED))


async def delete_batch(session: WriteSession, scope: TenantScope, batch_id: str) -> None:
    await session.execute(delete(BatchRow).where(BatchRow.tenant_id == scope, BatchRow.id == batch_id))


async def count_open(session: ReadSession, scope: TenantScope, limit: int) -> int:
    """Returns how many batches of the tenant have not ended; `limit` if there are more."""
    unended = select(BatchRow.id).where(BatchRow.tenant_id == scope, BatchRow.ended_at.is_(None)).limit(limit)
    return len((await session.scalars(unended)).all())


# Claims


async def find_free(session: ReadSession, lease: GatewayLease, limit: int) -> list[str]:
    """Returns the ids of the oldest batches of all tenants that have not ended and that no living gateway runs."""
    free = select(BatchRow.id).where(BatchRow.ended_at.is_(None), _is_free(session, lease))
    return list((await session.scalars(free.order_by(BatchRow.id).limit(limit))).all())


async def claim(session: WriteSession, lease: GatewayLease, batch_id: str) -> Batch | None:
    """Lets this gateway run a batch, in a new epoch. Returns None if another gateway was faster."""
    mine = update(BatchRow).where(BatchRow.id == batch_id, BatchRow.ended_at.is_(None), _is_free(session, lease))
    taken = mine.values(gateway=lease.gateway_id, epoch=BatchRow.epoch + 1).execution_options(**_CHANGED)
    if cast(CursorResult[Any], await session.execute(taken)).rowcount == 0:
        return None
    row = (await session.execute(select(BatchRow).where(BatchRow.id == batch_id))).scalar_one()
    return _batch(row)


async def find_claimed(session: ReadSession, batch_ids: Collection[str]) -> dict[str, Batch]:
    """Returns the present state of these batches, by id. A batch that was deleted is left out."""
    rows = await session.scalars(select(BatchRow).where(BatchRow.id.in_(list(batch_ids))))
    return {row.id: _batch(row) for row in rows.all()}


async def release(session: WriteSession, batch: Batch) -> None:
    """Lets other gateways run a batch that this one has claimed."""
    mine = update(BatchRow).where(BatchRow.id == batch.id, BatchRow.epoch == batch.epoch)
    await session.execute(mine.values(gateway=None).execution_options(**_CHANGED))


async def hold(session: WriteSession, claimed: Batch) -> Batch | None:
    """Returns the present state of a batch that this gateway has claimed, and locks it until the transaction ends.

    Returns None if another gateway has claimed it since, or if it is gone.
    """
    statement = select(BatchRow).where(
        BatchRow.tenant_id == claimed.tenant_id, BatchRow.id == claimed.id, BatchRow.epoch == claimed.epoch
    )
    row = await session.scalar(statement.with_for_update())
    return _batch(row) if row else None


# Answers


async def add_answer(session: WriteSession, batch: Batch, outcome: LineOutcome) -> bool:
    """Stores the answer to a line, and counts it. Returns False and changes nothing if the line has one already."""
    values: Mapping[str, Any] = {
        "batch_id": batch.id,
        "line": outcome.line,
        "tenant_id": batch.tenant_id,
        "is_error": outcome.is_error,
        "body": outcome.body,
    }
    values = (await row_sealer(session, batch.tenant_id)).sealed(BatchAnswerRow, values)
    if not await insert_once(session, BatchAnswerRow, values):
        return False
    counted = BatchRow.errored if outcome.is_error else BatchRow.succeeded
    sums = {name: getattr(BatchRow, name) + getattr(outcome.usage, name) for name in _USAGE}
    mine = update(BatchRow).where(BatchRow.tenant_id == batch.tenant_id, BatchRow.id == batch.id)
    await session.execute(mine.values({counted: counted + 1} | {getattr(BatchRow, n): v for n, v in sums.items()}))
    return True


async def answered_lines(session: ReadSession, batch: Batch) -> set[int]:
    """Returns the numbers of the lines that have an answer."""
    statement = select(BatchAnswerRow.line).where(*_answers(batch))
    return set((await session.scalars(statement)).all())


async def answers_after(session: ReadSession, batch: Batch, line: int, limit: int) -> list[LineOutcome]:
    """Returns the answers to lines after the number `line`, in the order of the lines."""
    statement = select(BatchAnswerRow.line, BatchAnswerRow.is_error, BatchAnswerRow.body).where(
        *_answers(batch), BatchAnswerRow.line > line
    )
    found = await session.execute(statement.order_by(BatchAnswerRow.line).limit(limit))
    opener = await row_opener(session, batch.tenant_id)
    return [
        LineOutcome(number, is_error, opener.opened(BatchAnswerRow, "body", body, batch.id, number))
        for number, is_error, body in found.all()
    ]


async def delete_answers(session: WriteSession, batch: Batch) -> None:
    await session.execute(delete(BatchAnswerRow).where(*_answers(batch)))


# The end


async def find_old(session: ReadSession, ended_before: float, limit: int) -> list[Batch]:
    """Returns batches of all tenants that ended before a time, in Unix seconds."""
    statement = select(BatchRow).where(BatchRow.ended_at < ended_before).order_by(BatchRow.ended_at).limit(limit)
    return [_batch(row) for row in (await session.scalars(statement)).all()]


async def find_ended(session: ReadSession, scope: TenantScope, before: float, limit: int) -> list[Batch]:
    """Returns batches of the tenant that ended before a time, in Unix seconds."""
    rows = await session.scalars(_of(scope).where(BatchRow.ended_at < before).order_by(BatchRow.id).limit(limit))
    return [_batch(row) for row in rows.all()]


async def erase(session: WriteSession, scope: TenantScope) -> None:
    """Deletes all batches of a tenant and their answers."""
    await session.execute(delete(BatchAnswerRow).where(BatchAnswerRow.tenant_id == scope))
    await session.execute(delete(BatchRow).where(BatchRow.tenant_id == scope))


def _of(scope: TenantScope) -> Select[BatchRow]:
    return select(BatchRow).where(BatchRow.tenant_id == scope)


def _answers(batch: Batch) -> tuple[ColumnElement[bool], ...]:
    return BatchAnswerRow.tenant_id == batch.tenant_id, BatchAnswerRow.batch_id == batch.id


def _is_free(session: ReadSession, lease: GatewayLease) -> ColumnElement[bool]:
    return not_(gateways.is_alive(session, BatchRow.gateway, lease.lease_s, lease.clock))


_PLAIN = tuple(
    field.name
    for field in fields(Batch)
    if field.name not in ("tenant_id", "key_id", "form", "status", "ending", "errors", "usage", "client_metadata")
)


def _whole(row: BatchRow, opener: RowOpener) -> Batch:
    """Reads a batch with the metadata of its tenant."""
    metadata = opener.opened(BatchRow, "client_metadata", row.client_metadata, row.id)
    return replace(_batch(row), client_metadata=metadata)


def _batch(row: BatchRow) -> Batch:
    """Reads a batch without its metadata, for the gateways that run and delete the batches of all tenants."""
    plain = {name: getattr(row, name) for name in _PLAIN}
    return Batch(
        **plain,
        tenant_id=TenantId(row.tenant_id),
        key_id=KeyId(row.key_id),
        form=BatchForm(row.form),
        status=BatchStatus(row.status),
        client_metadata=None,
        ending=None if row.ending is None else BatchStatus(row.ending),
        errors=tuple(row.errors or ()),
        usage=BatchUsage(**{name: getattr(row, name) for name in _USAGE}),
    )
