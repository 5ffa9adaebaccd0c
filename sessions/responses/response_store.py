"""Responses in the database: what was asked for, by the id of the turn that answers it.

Owns the transactions; what was answered is the turn's.
"""

from graftwork.platform.database import Database
from graftwork.platform.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.responses import repository
from graftwork.sessions.responses.response_record import ResponseRecord


class ResponseStore:
    """Responses of all tenants; each verb is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, scope: TenantScope, record: ResponseRecord) -> None:
        """Store a response whose turn has begun."""
        async with self._database.write() as database:
            await repository.insert_response(database, scope, record)

    async def find(self, scope: TenantScope, response_id: str) -> ResponseRecord | None:
        """A stored response; None too for what cannot be an id."""
        if not (response_id.isascii() and response_id.isprintable()):
            return None
        async with self._database.read() as database:
            return await repository.find_response(database, scope, response_id)

    async def find_older(self, before: float, limit: int) -> list[tuple[TenantScope, ResponseRecord]]:
        """Responses of all tenants from before that time, the oldest first."""
        async with self._database.read() as database:
            found = await repository.find_older(database, before, limit)
        return [(scope_of_tenant(AdminPrincipal(), tenant_id), record) for tenant_id, record in found]

    async def delete(self, scope: TenantScope, response_id: str) -> None:
        """Forget a response; nothing happens if it is not there."""
        async with self._database.write() as database:
            await repository.delete_response(database, scope, response_id)
