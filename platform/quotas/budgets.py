"""The monthly token budget: what the ledger says is spent, plus what is in flight, never passes the limit.

The order matters. A reservation first adds its tokens to the tokens in flight and learns their sum. Then it reads the
ledger. A request is written to the ledger before its reservation is settled. So every other request is in the sum,
or in the ledger, or comes later and counts this one. It may count twice for a moment, but it is never missed.
"""

from datetime import UTC, datetime
from typing import Protocol

from graftwork.platform.clock import Clock
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota, budget_spent


class TokenLedger(Protocol):
    """Knows what a tenant has spent."""

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Prompt and completion tokens of the requests recorded at `start` or later."""
        ...


class Refundable(Protocol):
    """A reservation that can be undone."""

    async def refund(self) -> None: ...


class MonthlyBudget:
    """Refuses reservations that would overspend a month."""

    def __init__(self, ledger: TokenLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def check(self, tenant_id: TenantId, quota: Quota, tokens_in_flight: int, reservation: Refundable) -> None:
        """Check a reservation whose tokens are already in `tokens_in_flight`. Raises BudgetSpent after refunding it."""
        if quota.monthly_tokens is None:
            return
        kept = False
        try:
            spent_tokens = await self._ledger.tokens_since(tenant_id, month_start(self._clock.now()))
            kept = spent_tokens + tokens_in_flight <= quota.monthly_tokens
        finally:  # also when the ledger cannot be read or the caller is cancelled
            if not kept:
                await reservation.refund()
        if not kept:
            raise budget_spent(quota, spent_tokens + tokens_in_flight)


def month_start(now: float) -> float:
    """When the calendar month of `now` began, in UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
