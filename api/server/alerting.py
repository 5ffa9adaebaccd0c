"""Lets a gateway notice budgets that are reached, and send the alerts that are due, until it closes.

Owns the three repeated tasks and their pace. What they do is in `platform/alerts`.
"""

from contextlib import AsyncExitStack

from graftwork.api.deps.resources import repeating
from graftwork.api.server.foundation import Foundation
from graftwork.platform.alerts.budget_alerts import DELIVER_S, WATCH_S, BudgetAlerts
from graftwork.platform.alerts.sender import AlertSender

_SWEEP_S = 3600.0


async def send_alerts(stack: AsyncExitStack, base: Foundation, pepper: bytes) -> None:
    """Begins the tasks. The end of `stack` ends them; what is not sent then is still in the database."""
    sender = AlertSender(base.clock, base.settings.webhook_networks)
    alerts = BudgetAlerts(base.database, base.clock, pepper, sender)
    await stack.enter_async_context(repeating(alerts.watch, WATCH_S, "looking for budgets that are reached"))
    await stack.enter_async_context(repeating(alerts.deliver, DELIVER_S, "sending alerts"))
    await stack.enter_async_context(repeating(alerts.drop_old, _SWEEP_S, "the sweep of old alerts"))
