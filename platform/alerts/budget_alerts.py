"""Notices budgets that are reached, and sends an alert for each once in a month.

    watch ──► spent this month ≥ soft or monthly budget ──► a row of the outbox, once for each threshold and month
    deliver ──► claim a due row ──► send ──► delivered, or due again later, or given up with an entry in the audit log

Owns the outbox in the database, which all gateways share. A row is claimed before it is sent, so gateways rarely send
twice; a gateway that dies while it sends leaves the row due again. So an alert arrives at least once, and its receiver
knows repetitions by its id. Never refuses a request: `platform/quotas/budget.py` does.
"""

import logging
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from graftwork.platform.alerts import repository
from graftwork.platform.alerts.repository import Alert, Budget
from graftwork.platform.alerts.sender import AlertSender, Attempt, Verdict
from graftwork.platform.alerts.signing import webhook_secret
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.ledger.spend_rows import find_spent
from graftwork.platform.prices.rates import amount_text, from_atoms
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import month_of
from graftwork.platform.tenancy.repository import add_audit_entry
from graftwork.platform.tenancy.tenants import AuditEntry

WATCH_S = 5.0
"""How often a gateway looks for budgets that are reached, in seconds."""
DELIVER_S = 1.0
"""How often a gateway looks for alerts that are due, in seconds."""
MAX_ATTEMPTS = 8
FIRST_RETRY_S = 10.0
_RETRY_FACTOR = 4
_MOST_RETRY_S = 6 * 3600.0
_CLAIMED_FOR_S = 60.0
_ALERTS_PER_ROUND = 10
_TYPES = {"soft_budget": "budget.soft_reached", "monthly_budget": "budget.reached"}
_ACTOR = "server"

logger = logging.getLogger(__name__)


def retry_after_s(attempts: int) -> float:
    """Returns the pause before the next attempt, after so many: 10 s, 40 s, 160 s and so on, up to six hours."""
    return float(min(FIRST_RETRY_S * _RETRY_FACTOR ** (attempts - 1), _MOST_RETRY_S))


class BudgetAlerts:
    """The alerts of all gateways that share the database."""

    def __init__(self, database: Database, clock: Clock, pepper: bytes, sender: AlertSender) -> None:
        self._database = database
        self._clock = clock
        self._pepper = pepper
        self._sender = sender

    async def watch(self) -> int:
        """Makes an alert for each budget that is reached and has none this month. Returns how many were made."""
        now = self._clock.now()
        async with self._database.read() as session:
            alerts = await self._find_reached(session, now)
        made = 0
        for alert in alerts:
            async with self._database.write() as session:
                made += await repository.add_alert(session, alert)
        return made

    async def deliver(self) -> int:
        """Sends the alerts that are due. Returns how many were delivered."""
        now = self._clock.now()
        async with self._database.read() as session:
            due = await repository.find_due(session, now, _ALERTS_PER_ROUND)
        delivered = 0
        for alert, due_at in due:
            async with self._database.write() as session:
                if not await repository.claim(session, alert, due_at, now + _CLAIMED_FOR_S):
                    continue
            delivered += await self._deliver(alert)
        return delivered

    async def drop_old(self) -> None:
        """Removes the alerts of earlier months that have ended."""
        async with self._database.write() as session:
            await repository.drop_alerts_before(session, month_of(self._clock.now()))

    async def _find_reached(self, session: ReadSession, now: float) -> list[Alert]:
        month = month_of(now)
        budgets = []
        for budget in await repository.find_budgets(session):
            if budget.level is Level.USER and budget.owner_id == budget.tenant_id:
                users = await repository.find_spending_users(session, budget.tenant_id, month)
                budgets += [_of_user(budget, user) for user in users]
            else:
                budgets.append(budget)
        owner_ids = [budget.owner_id for budget in budgets]
        if not owner_ids:
            return []
        spent = await find_spent(session, owner_ids, month)
        reached = [
            alert for budget in budgets for alert in _reached(budget, spent.get(budget.owner_id, Spent()), month, now)
        ]
        known = await repository.find_thresholds(session, {alert.owner_id for alert in reached}, month)
        return [alert for alert in reached if (alert.owner_id, alert.threshold) not in known]

    async def _deliver(self, alert: Alert) -> bool:
        async with self._database.read() as session:
            webhook = await repository.find_webhook(session, alert.webhook_owner_id)
        if webhook is None:
            attempt = Attempt(Verdict.REFUSED, "the webhook was deleted")
        else:
            secret = webhook_secret(webhook.webhook_id, self._pepper)
            attempt = await self._sender.send(webhook.url, secret, alert.payload)
        attempts, now = alert.attempts + 1, self._clock.now()
        async with self._database.write() as session:
            if attempt.verdict is Verdict.DELIVERED:
                await repository.end_alert(session, alert, now)
                return True
            if attempt.verdict is Verdict.RETRY and attempts < MAX_ATTEMPTS:
                await repository.put_off(session, alert, now + retry_after_s(attempts))
                return False
            await repository.end_alert(session, alert, None)
            details = {"alert": alert.alert_id, "reason": attempt.reason, "attempts": attempts}
            owner = alert.tenant_id or TenantId("")
            entry = AuditEntry(new_id("aud"), now, _ACTOR, "webhook.dropped", owner, alert.webhook_owner_id, details)
            await add_audit_entry(session, entry)
        logger.warning("webhook_dropped", extra={"owner_id": alert.webhook_owner_id, "reason": attempt.reason})
        return False


def _of_user(budget: Budget, user_id: str) -> Budget:
    amounts = (budget.monthly_budget, budget.soft_budget, budget.currency)
    return Budget(user_id, Level.USER, budget.tenant_id, *amounts, budget.webhook_owner_id)


def _reached(budget: Budget, spent: Spent, month: str, now: float) -> Iterator[Alert]:
    """Yields an alert for each budget of an owner that what it has spent reaches."""
    amount = from_atoms(spent.atoms.get(budget.currency, 0))
    for name, threshold in (("soft_budget", budget.soft_budget), ("monthly_budget", budget.monthly_budget)):
        if threshold is None or amount < Decimal(threshold):
            continue
        alert_id = new_id("alt")
        money = {"amount": threshold, "currency": budget.currency}
        data: dict[str, Any] = {
            "level": str(budget.level),
            "owner_id": budget.owner_id,
            "tenant_id": budget.tenant_id,
            "month": month,
            "budget": money,
            "spent": {"amount": amount_text(amount), "currency": budget.currency},
        }
        payload = {"id": alert_id, "object": "alert", "type": _TYPES[name], "created_at": int(now), "data": data}
        yield Alert(
            alert_id=alert_id,
            owner_id=budget.owner_id,
            month=month,
            threshold=f"{name} {threshold} {budget.currency}",
            tenant_id=budget.tenant_id,
            webhook_owner_id=budget.webhook_owner_id,
            payload=payload,
            created_at=now,
        )
