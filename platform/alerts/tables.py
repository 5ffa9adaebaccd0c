"""Defines the SQL tables of webhooks and of the alerts that are sent to them. Times are in Unix seconds."""

from typing import Any

from sqlalchemy import JSON, Float, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class WebhookRow(Base):
    """Where the alerts of one organisation or tenant are sent."""

    __tablename__ = "webhooks"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The id of the organisation or tenant."""
    id: Mapped[str] = mapped_column(String(64))
    """A new one for each change. The secret of the signatures follows from it and the server's pepper."""
    url: Mapped[str] = mapped_column(String(2000))
    created_at: Mapped[float] = mapped_column(Float)


class BudgetAlertRow(Base):
    """An alert, and how far its delivery is: the outbox. The primary key allows one alert for each threshold and month."""

    __tablename__ = "budget_alerts"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The organisation, tenant, key or end user whose budget it is."""
    month: Mapped[str] = mapped_column(String(7), primary_key=True)
    threshold: Mapped[str] = mapped_column(String(100), primary_key=True)
    """The kind of the budget, its amount and its currency, such as `soft_budget 80 USD`."""
    id: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[str | None] = mapped_column(String(64))
    webhook_owner_id: Mapped[str] = mapped_column(String(64))
    """Whose webhook gets it: an organisation or a tenant."""
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float] = mapped_column(Float)
    attempts: Mapped[int] = mapped_column(Integer)
    due_at: Mapped[float | None] = mapped_column(Float, index=True)
    """When the next attempt is due; NULL if the alert was delivered or was given up."""
    delivered_at: Mapped[float | None] = mapped_column(Float)
