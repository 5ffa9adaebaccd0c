"""The monthly token budget: what the ledger says is spent, plus what is in flight, never passes the limit.

Why the order matters. A reservation first joins the tokens in flight, which answers their sum at that moment,
and only then reads the ledger; a request is entered in the ledger before its reservation is settled.
So any other request is in the sum, or in the ledger, or came later and sees this one: it may be counted twice
for a moment, never not at all.
"""

from datetime import UTC, datetime
from typing import Protocol

from graftwork.platform.clock import Clock
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota, budget_spent


class TokenLedger(Protocol):
    """Whoever knows what was spent."""

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Prompt and completion tokens of the requests recorded at `start` or later."""
        ...


class Refundable(Protocol):
    """The part of a reservation that undoes it."""

    async def refund(self) -> None: ...


class MonthlyBudget:
    """Refuses reservations that would overspend a month."""

    def __init__(self, ledger: TokenLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def check(self, tenant_id: TenantId, quota: Quota, tokens_in_flight: int, reservation: Refundable) -> None:
        """Keep `reservation`, whose tokens are in `tokens_in_flight`, or refund it and raise BudgetSpent."""
        if quota.monthly_tokens is None:
            return
        kept = False
        try:
            spent_tokens = await self._ledger.tokens_since(tenant_id, month_start(self._clock.now()))
            kept = spent_tokens + tokens_in_flight <= quota.monthly_tokens
        finally:  # also when the ledger is away or the caller is gone
            if not kept:
                await reservation.refund()
        if not kept:
            raise budget_spent(quota, spent_tokens + tokens_in_flight)


def month_start(now: float) -> float:
    """When the calendar month of `now` began, in UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
