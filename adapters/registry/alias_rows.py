"""Contains the SQL statements over aliases and their history. Never opens or commits a transaction: the caller does.

Invariant: every statement reads or changes rows of one tenant only, and the newest change of an alias has its target.
"""

from collections.abc import Sequence

from sqlalchemy import Select, delete, select

from graftwork.adapters.format.specs import AliasEvent
from graftwork.adapters.registry.repository import target_of
from graftwork.adapters.registry.tables import AdapterAliasRow, AliasChangeRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import AdapterId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope


class AliasReader:
    """Reads the history of one adapter's aliases."""

    def __init__(self, session: ReadSession, scope: TenantScope, adapter_id: AdapterId) -> None:
        self._session = session
        self._scope = scope
        self._adapter_id = adapter_id

    async def newest(self, alias: str) -> AliasEvent | None:
        """Returns the last change of an alias; None if it never had a target."""
        return await self._first(self._of(alias).order_by(AliasChangeRow.number.desc()).limit(1))

    async def change(self, alias: str, number: int) -> AliasEvent | None:
        return await self._first(self._of(alias).where(AliasChangeRow.number == number))

    async def page(self, alias: str, request: PageRequest) -> Page[AliasEvent]:
        """Returns one page of the history of an alias. `request.after` is the number of a change, as text."""
        statement = self._of(alias)
        is_ascending = request.order is Order.ASCENDING
        if request.after is not None:
            after = int(request.after)
            later = AliasChangeRow.number > after
            statement = statement.where(later if is_ascending else AliasChangeRow.number < after)
        by = AliasChangeRow.number.asc() if is_ascending else AliasChangeRow.number.desc()
        rows: Sequence[AliasChangeRow] = (
            await self._session.scalars(statement.order_by(by).limit(request.limit + 1))
        ).all()
        return cut([_event(row) for row in rows], request)

    def _of(self, alias: str) -> Select[AliasChangeRow]:
        return select(AliasChangeRow).where(
            AliasChangeRow.tenant_id == self._scope,
            AliasChangeRow.adapter_id == self._adapter_id,
            AliasChangeRow.alias == alias,
        )

    async def _first(self, statement: Select[AliasChangeRow]) -> AliasEvent | None:
        row = (await self._session.scalars(statement)).first()
        return None if row is None else _event(row)


class AliasWriter(AliasReader):
    """Reads and changes the aliases of one adapter, whose row the caller has locked."""

    def __init__(self, session: WriteSession, scope: TenantScope, adapter_id: AdapterId) -> None:
        super().__init__(session, scope, adapter_id)
        self._writer = session

    async def put(self, alias: str, event: AliasEvent) -> None:
        """Gives the alias the target of `event`, or removes it if this is None, and adds the event to its history."""
        await self._writer.execute(
            delete(AdapterAliasRow).where(
                AdapterAliasRow.tenant_id == self._scope,
                AdapterAliasRow.adapter_id == self._adapter_id,
                AdapterAliasRow.alias == alias,
            )
        )
        weights = None if event.target is None else [[float(number), share] for number, share in event.target.weights]
        owner = {"adapter_id": self._adapter_id, "alias": alias, "tenant_id": self._scope}
        if weights is not None:
            self._writer.add(AdapterAliasRow(**owner, weights=weights, updated_at=event.at))
        self._writer.add(
            AliasChangeRow(
                **owner,
                number=event.number,
                weights=weights,
                returns_to=event.returns_to,
                reason=event.reason,
                actor=event.actor,
                at=event.at,
            )
        )
        await self._writer.flush()


def _event(row: AliasChangeRow) -> AliasEvent:
    target = None if row.weights is None else target_of(row.weights)
    return AliasEvent(row.number, target, row.returns_to, row.reason, row.actor, row.at)
