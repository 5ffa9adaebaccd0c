"""Contains the SQL statements over webhooks, alerts and the budgets that alerts are about.

Never commits: the caller that opened the session does. Statements about all tenants serve the operator's alerts, which
no tenant reads.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import delete, or_, select, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.alerts.tables import BudgetAlertRow, WebhookRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.tables import MonthlySpendRow
from graftwork.platform.quotas.limits import Level
from graftwork.platform.tenancy.repository import insert_once
from graftwork.platform.tenancy.tables import OwnerQuotaRow, QuotaRow, TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where the alerts of an organisation or a tenant are sent."""

    owner_id: str
    webhook_id: str
    url: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The budgets of one owner, with the webhook that their alerts go to."""

    owner_id: str
    level: Level
    tenant_id: TenantId | None
    monthly_budget: str | None
    soft_budget: str | None
    currency: str
    webhook_owner_id: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that is to be sent."""

    alert_id: str
    owner_id: str
    month: str
    threshold: str
    tenant_id: TenantId | None
    webhook_owner_id: str
    payload: dict[str, Any]
    created_at: float
    attempts: int = 0


async def put_webhook(session: WriteSession, webhook: Webhook) -> None:
    row = WebhookRow(owner_id=webhook.owner_id, id=webhook.webhook_id, url=webhook.url, created_at=webhook.created_at)
    await session.merge(row)
    await session.flush()


async def find_webhook(session: ReadSession, owner_id: str) -> Webhook | None:
    row = await session.get(WebhookRow, owner_id)
    return None if row is None else Webhook(row.owner_id, row.id, row.url, row.created_at)


async def delete_webhook(session: WriteSession, owner_id: str) -> bool:
    """Deletes a webhook. Returns whether there was one."""
    deleted = await session.execute(delete(WebhookRow).where(WebhookRow.owner_id == owner_id))
    return cast(CursorResult[Any], deleted).rowcount > 0


async def find_budgets(session: ReadSession) -> list[Budget]:
    """Returns the budgets of all owners whose alerts have a webhook: their tenant's, or else their organisation's.

    Budgets of each end user of a tenant have the tenant's id as their owner.
    """
    hooks = set(await session.scalars(select(WebhookRow.owner_id)))
    if not hooks:
        return []
    budgets = []
    for row, organisation_id in await _quotas(session):
        tenant_id = None if row.tenant_id is None else TenantId(row.tenant_id)
        webhook_owner_id = next((one for one in (tenant_id, organisation_id) if one in hooks), None)
        if webhook_owner_id is not None and row.currency is not None:
            owner_id, level = (
                (row.tenant_id, Level.TENANT) if isinstance(row, QuotaRow) else (row.owner_id, Level(row.level))
            )
            amounts = (row.monthly_budget, row.soft_budget, row.currency)
            budgets.append(Budget(owner_id, level, tenant_id, *amounts, webhook_owner_id))
    return budgets


async def _quotas(session: ReadSession) -> list[tuple[QuotaRow | OwnerQuotaRow, str | None]]:
    """Returns all limits with a budget, each with the organisation that it belongs to."""
    rows: list[tuple[QuotaRow | OwnerQuotaRow, str | None]] = []
    alive = TenantRow.status != TenantStatus.DELETED
    of_tenants = select(QuotaRow, TenantRow.organisation_id).join(TenantRow, TenantRow.id == QuotaRow.tenant_id)
    rows += [
        (row, organisation)
        for row, organisation in await session.execute(of_tenants.where(_has_budget(QuotaRow), alive))
    ]
    narrower = select(OwnerQuotaRow, TenantRow.organisation_id).join(TenantRow, TenantRow.id == OwnerQuotaRow.tenant_id)
    rows += [
        (row, organisation)
        for row, organisation in await session.execute(narrower.where(_has_budget(OwnerQuotaRow), alive))
    ]
    wider = select(OwnerQuotaRow).where(OwnerQuotaRow.level == Level.ORGANISATION, _has_budget(OwnerQuotaRow))
    rows += [(row, row.owner_id) for row in await session.scalars(wider)]
    return rows


def _has_budget(row: type[QuotaRow] | type[OwnerQuotaRow]) -> Any:
    return or_(row.monthly_budget.is_not(None), row.soft_budget.is_not(None))


async def find_spending_users(session: ReadSession, tenant_id: TenantId, month: str) -> list[str]:
    """Returns the ids of a tenant's end users that have used anything in a month, without those with limits of their own."""
    own = select(OwnerQuotaRow.owner_id).where(OwnerQuotaRow.tenant_id == tenant_id)
    mine = (MonthlySpendRow.tenant_id == tenant_id, MonthlySpendRow.month == month)
    users = select(MonthlySpendRow.owner_id).where(
        *mine, MonthlySpendRow.owner_id.startswith("usr_", autoescape=True), MonthlySpendRow.owner_id.not_in(own)
    )
    return list(await session.scalars(users.distinct()))


async def find_thresholds(session: ReadSession, owner_ids: Collection[str], month: str) -> set[tuple[str, str]]:
    """Returns the owners and thresholds of a month for which there is an alert."""
    statement = select(BudgetAlertRow.owner_id, BudgetAlertRow.threshold)
    mine = statement.where(BudgetAlertRow.owner_id.in_(list(owner_ids)), BudgetAlertRow.month == month)
    return {(owner_id, threshold) for owner_id, threshold in await session.execute(mine)}


async def add_alert(session: WriteSession, alert: Alert) -> bool:
    """Adds an alert, which is due at once. Returns False if there is one for the same threshold and month."""
    values = {
        "owner_id": alert.owner_id,
        "month": alert.month,
        "threshold": alert.threshold,
        "id": alert.alert_id,
        "tenant_id": alert.tenant_id,
        "webhook_owner_id": alert.webhook_owner_id,
        "payload": alert.payload,
        "created_at": alert.created_at,
        "attempts": 0,
        "due_at": alert.created_at,
    }
    return await insert_once(session, BudgetAlertRow, values)


async def find_due(session: ReadSession, now: float, limit: int) -> Sequence[tuple[Alert, float]]:
    """Returns alerts that are due, with the times at which they are."""
    due = select(BudgetAlertRow).where(BudgetAlertRow.due_at <= now).order_by(BudgetAlertRow.due_at).limit(limit)
    return [(_alert(row), row.due_at) for row in await session.scalars(due) if row.due_at is not None]


async def claim(session: WriteSession, alert: Alert, was_due_at: float, due_at: float) -> bool:
    """Puts off an alert until `due_at`, so that no other gateway sends it meanwhile. Returns False if another has."""
    mine = (*_is(alert), BudgetAlertRow.due_at == was_due_at)
    claimed = await session.execute(
        update(BudgetAlertRow).where(*mine).values(due_at=due_at, attempts=BudgetAlertRow.attempts + 1)
    )
    return cast(CursorResult[Any], claimed).rowcount == 1


async def end_alert(session: WriteSession, alert: Alert, delivered_at: float | None) -> None:
    """Marks an alert as delivered, or as given up for None."""
    await session.execute(update(BudgetAlertRow).where(*_is(alert)).values(due_at=None, delivered_at=delivered_at))


async def put_off(session: WriteSession, alert: Alert, due_at: float) -> None:
    await session.execute(update(BudgetAlertRow).where(*_is(alert)).values(due_at=due_at))


async def drop_alerts_before(session: WriteSession, month: str) -> None:
    """Removes alerts of earlier months that are delivered or given up."""
    old = (BudgetAlertRow.month < month, BudgetAlertRow.due_at.is_(None))
    await session.execute(delete(BudgetAlertRow).where(*old))


async def erase_alerts(session: WriteSession, tenant_id: TenantId) -> None:
    """Removes all alerts of a tenant, its keys and its end users."""
    await session.execute(delete(BudgetAlertRow).where(BudgetAlertRow.tenant_id == tenant_id))


def _is(alert: Alert) -> tuple[Any, ...]:
    return (
        BudgetAlertRow.owner_id == alert.owner_id,
        BudgetAlertRow.month == alert.month,
        BudgetAlertRow.threshold == alert.threshold,
    )


def _alert(row: BudgetAlertRow) -> Alert:
    return Alert(
        alert_id=row.id,
        owner_id=row.owner_id,
        month=row.month,
        threshold=row.threshold,
        tenant_id=None if row.tenant_id is None else TenantId(row.tenant_id),
        webhook_owner_id=row.webhook_owner_id,
        payload=row.payload,
        created_at=row.created_at,
        attempts=row.attempts,
    )
