"""Stores responses in the database: the request of each response, under the response's id.

Owns the rows and their transactions. Never stores the answer, which is stored with the response's turn.
"""

from sqlalchemy import delete, insert, select

from graftwork.platform.contents.rows import RowOpener, row_opener, row_sealer
from graftwork.platform.database import Database
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.responses.record import ResponseRecord, turn_of
from graftwork.sessions.store.tables import ResponseRow


class ResponseStore:
    """Stores the responses of all tenants. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, scope: TenantScope, record: ResponseRecord) -> None:
        """Stores a response. Call this method after the turn of the response has begun."""
        async with self._database.write() as database:
            row = {
                "id": record.response_id,
                "tenant_id": scope,
                "session_id": record.session_id,
                "request": dict(record.echo),
                "created_at": record.created_at,
            }
            sealer = await row_sealer(database, scope)
            await database.execute(insert(ResponseRow).values(**sealer.sealed(ResponseRow, row)))

    async def find(self, scope: TenantScope, response_id: str) -> ResponseRecord | None:
        """Returns a stored response. Returns None if no response has this id."""
        if not (response_id.isascii() and response_id.isprintable()):
            return None
        async with self._database.read() as database:
            row = await database.scalar(
                select(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant_id == scope)
            )
            return None if row is None else _record(row, await row_opener(database, scope))

    async def find_older(self, before: float, limit: int) -> list[tuple[TenantScope, str, SessionId]]:
        """Finds up to `limit` responses of all tenants that were created before the time `before`, the oldest first.

        Returns the tenant, id and session of each. `before` is in Unix seconds.
        """
        columns = ResponseRow.tenant_id, ResponseRow.id, ResponseRow.session_id
        old = select(*columns).where(ResponseRow.created_at < before).order_by(ResponseRow.created_at)
        async with self._database.read() as database:
            found = (await database.execute(old.limit(limit))).all()
        admin = AdminPrincipal()
        return [(scope_of_tenant(admin, TenantId(tenant)), one, SessionId(session)) for tenant, one, session in found]

    async def find_older_of(self, scope: TenantScope, before: float, limit: int) -> list[tuple[str, SessionId]]:
        """Finds up to `limit` responses of one tenant that were created before the time `before`, the oldest first.

        Returns the id and session of each. `before` is in Unix seconds.
        """
        mine = select(ResponseRow.id, ResponseRow.session_id)
        mine = mine.where(ResponseRow.created_at < before, ResponseRow.tenant_id == scope)
        async with self._database.read() as database:
            found = (await database.execute(mine.order_by(ResponseRow.created_at).limit(limit))).all()
        return [(response_id, SessionId(session_id)) for response_id, session_id in found]

    async def delete(self, scope: TenantScope, response_id: str) -> None:
        """Deletes a response, but not its turn. Does nothing if the response does not exist."""
        async with self._database.write() as database:
            await database.execute(
                delete(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant_id == scope)
            )


def _record(row: ResponseRow, opener: RowOpener) -> ResponseRecord:
    request = opener.opened(ResponseRow, "request", row.request, row.id)
    return ResponseRecord(turn_of(row.id), SessionId(row.session_id), request, row.created_at)
