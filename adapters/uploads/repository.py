"""Contains the SQL statements over uploads in parts and fetches. Never opens or commits a transaction: the caller does.

Invariant: every statement reads or changes rows of one tenant only, except those for the sweep, those for the gateways
that fetch, and the sum of the bytes of all.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import Select, and_, delete, func, or_, select, update
from sqlalchemy.engine import CursorResult

from graftwork.adapters.format.specs import Provenance
from graftwork.adapters.inspection.upload import Push
from graftwork.adapters.sources.source import parse_source
from graftwork.adapters.uploads.pending_upload import OPEN, PendingUpload, UploadStatus
from graftwork.adapters.uploads.tables import AdapterUploadRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope

_Row = AdapterUploadRow
_ID = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_BEING_FETCHED = (UploadStatus.FETCHING, UploadStatus.INSPECTING)


async def add(session: WriteSession, upload: PendingUpload) -> None:
    session.add(
        _Row(
            id=upload.id,
            tenant_id=upload.tenant_id,
            name=upload.name,
            status=upload.status,
            size_bytes=upload.size_bytes,
            digest=upload.digest,
            source=None if upload.source is None else upload.source.text,
            push={name: value for name, value in asdict(upload.push).items() if value is not None},
            created_at=upload.created_at,
            expires_at=upload.expires_at,
        )
    )
    await session.flush()


async def find(session: ReadSession, scope: TenantScope, upload_id: str) -> PendingUpload | None:
    if not _ID.fullmatch(upload_id):  # keeps text that a database cannot store out of the statement
        return None
    row = (await session.scalars(_of(scope).where(_Row.id == upload_id))).first()
    return None if row is None else _upload(row)


async def page(
    session: ReadSession, scope: TenantScope, name: str | None, now: float, request: PageRequest
) -> Page[PendingUpload] | None:
    """Returns one page of a tenant's uploads that have not expired: of one adapter, or of all for None.

    Returns None if `request.after` is not the id of one of the tenant's uploads.
    """
    statement, is_ascending = _of(scope).where(_Row.expires_at > now), request.order is Order.ASCENDING
    if name is not None:
        statement = statement.where(_Row.name == name)
    if request.after is not None:
        if await find(session, scope, request.after) is None:
            return None
        statement = statement.where(_Row.id > request.after if is_ascending else _Row.id < request.after)
    by = _Row.id.asc() if is_ascending else _Row.id.desc()
    rows = (await session.scalars(statement.order_by(by).limit(request.limit + 1))).all()
    return cut([_upload(row) for row in rows], request)


async def count_open(session: ReadSession, scope: TenantScope) -> tuple[int, int]:
    """Returns how many uploads of a tenant have not ended, and the bytes that its client has announced in them."""
    sent = func.coalesce(func.sum(_Row.size_bytes).filter(_Row.status == UploadStatus.RECEIVING), 0)
    statement = select(func.count(), sent).where(_Row.tenant_id == scope, _Row.status.in_(OPEN))
    number, num_bytes = (await session.execute(statement)).one()
    return int(number), int(num_bytes)


async def sum_open_bytes(session: ReadSession) -> int:
    """Returns the bytes that the open uploads of all tenants may take."""
    statement = select(func.coalesce(func.sum(_Row.size_bytes), 0)).where(_Row.status.in_(OPEN))
    return int((await session.execute(statement)).scalar_one())


async def finish(session: WriteSession, upload: PendingUpload, owner: str | None = None) -> bool:
    """Stores the end of an open upload: its status, version and error. `owner` is the gateway that has fetched.

    Returns False if the upload is gone or has ended, or if another gateway fetches it now.
    """
    statement = _one(upload).where(_Row.status.in_(OPEN))
    if owner is not None:
        statement = statement.where(_Row.lease_owner == owner)
    values = {"status": upload.status, "version": upload.version, "error": upload.error, "lease_owner": None}
    return await _changes(session, statement.values(**values))


async def forget(session: WriteSession, scope: TenantScope, upload_id: str) -> bool:
    statement = delete(_Row).where(_Row.tenant_id == scope, _Row.id == upload_id)
    return await _changes(session, statement)


async def forget_all(session: WriteSession, scope: TenantScope) -> None:
    await session.execute(delete(_Row).where(_Row.tenant_id == scope))


# ---- for the gateways that fetch, and for the sweep: of all tenants -----------------------------------------------


async def due(session: ReadSession, now: float, limit: int) -> list[PendingUpload]:
    """Returns fetches of all tenants that no gateway is at, the oldest first."""
    waiting = and_(_Row.status.in_(_BEING_FETCHED), _Row.lease_until < now, _Row.next_at <= now)
    rows = (await session.scalars(select(_Row).where(waiting).order_by(_Row.id).limit(limit))).all()
    return [_upload(row) for row in rows]


async def take_lease(session: WriteSession, upload: PendingUpload, owner: str, now: float, lease_s: float) -> bool:
    """Begins a fetch for the gateway `owner`. Returns False if another gateway was first, or if the upload is gone."""
    waiting = _one(upload).where(_Row.status.in_(_BEING_FETCHED), _Row.lease_until < now)
    values = {"lease_owner": owner, "lease_until": now + lease_s, "attempts": _Row.attempts + 1}
    return await _changes(session, waiting.values(status=UploadStatus.FETCHING, **values))


async def keep_lease(session: WriteSession, upload: PendingUpload, owner: str, until: float) -> bool:
    """Renews a lease. Returns False if the gateway has lost it, or if the upload is gone."""
    return await _changes(session, _one(upload).where(_Row.lease_owner == owner).values(lease_until=until))


async def change(session: WriteSession, upload: PendingUpload, owner: str) -> bool:
    """Stores the status and the size of a fetch. Returns False as `keep_lease` does."""
    values = {"status": upload.status, "size_bytes": upload.size_bytes}
    return await _changes(session, _one(upload).where(_Row.lease_owner == owner).values(**values))


async def put_off(session: WriteSession, upload: PendingUpload, owner: str, next_at: float) -> None:
    """Gives a lease back. A gateway may begin again at `next_at`."""
    values = {"lease_owner": None, "lease_until": 0.0, "next_at": next_at}
    await session.execute(_one(upload).where(_Row.lease_owner == owner).values(**values))


async def lapsed(session: ReadSession, now: float, limit: int) -> Sequence[tuple[TenantId, str]]:
    """Returns uploads of all tenants that have expired, as (tenant, upload). One that a gateway fetches is not
    among them.
    """
    expired = and_(_Row.expires_at < now, or_(_Row.lease_owner.is_(None), _Row.lease_until < now))
    statement = select(_Row.tenant_id, _Row.id).where(expired).order_by(_Row.expires_at).limit(limit)
    return [(TenantId(tenant_id), upload_id) for tenant_id, upload_id in await session.execute(statement)]


def _of(scope: TenantScope) -> Select[AdapterUploadRow]:
    return select(_Row).where(_Row.tenant_id == scope)


def _one(upload: PendingUpload) -> Any:
    return update(_Row).where(_Row.tenant_id == upload.tenant_id, _Row.id == upload.id)


async def _changes(session: WriteSession, statement: Any) -> bool:
    return cast(CursorResult[Any], await session.execute(statement)).rowcount == 1


def _upload(row: AdapterUploadRow) -> PendingUpload:
    push = dict(row.push)
    return PendingUpload(
        id=row.id,
        tenant_id=TenantId(row.tenant_id),
        name=row.name,
        status=UploadStatus(row.status),
        size_bytes=row.size_bytes,
        digest=row.digest,
        created_at=row.created_at,
        expires_at=row.expires_at,
        source=None if row.source is None else parse_source(row.source),
        push=Push(**push | {"provenance": Provenance(**push["provenance"])}),
        error=row.error,
        version=row.version,
        attempts=row.attempts,
    )
