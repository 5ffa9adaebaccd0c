"""Adds organisations, limits of organisations, keys and end users, budgets in money, what was spent each month, and alerts.

What was spent this month is computed from the usage ledger.
"""

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0024_limits"
down_revision = "0023_engine_work"
branch_labels = None
depends_on = None

_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "max_adapters",
    "max_adapter_bytes",
    "max_adapter_rank",
    "max_sessions",
    "max_device_kv_bytes",
    "max_host_kv_bytes",
    "monthly_tokens",
)
_MONEY = {"monthly_budget": 32, "soft_budget": 32, "currency": 3}
_SPENT = """
INSERT INTO monthly_spend (owner_id, month, currency, shard, tenant_id, requests, tokens, cost_high, cost_low)
SELECT {owner}, substr(usage_events.day, 1, 7), coalesce(price_lists.currency, ''), 0, usage_events.tenant_id, count(*),
  sum(prompt_tokens + completion_tokens), sum(cost_atoms / 1000000000), sum(cost_atoms % 1000000000)
FROM usage_events LEFT JOIN price_lists ON price_lists.id = usage_events.price_id
WHERE usage_events.day >= '{first_day}'
GROUP BY {owner}, substr(usage_events.day, 1, 7), coalesce(price_lists.currency, ''), usage_events.tenant_id
"""
"""PostgreSQL and SQLite both divide whole numbers to a whole number."""


def upgrade() -> None:
    op.create_table(
        "organisations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_organisations"),
    )
    op.add_column("tenants", sa.Column("organisation_id", sa.String(64), nullable=True))
    op.create_index("ix_tenants_organisation_id", "tenants", ["organisation_id"])
    for name, length in _MONEY.items():
        op.add_column("quotas", sa.Column(name, sa.String(length), nullable=True))
    op.create_table(
        "owner_quotas",
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("level", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in _LIMITS),
        *(sa.Column(name, sa.String(length), nullable=True) for name, length in _MONEY.items()),
        sa.PrimaryKeyConstraint("owner_id", name="pk_owner_quotas"),
    )
    op.create_index("ix_owner_quotas_tenant_id", "owner_quotas", ["tenant_id"])
    op.add_column("usage_events", sa.Column("organisation_id", sa.String(64), nullable=True))
    op.add_column("usage_events", sa.Column("end_user_id", sa.String(64), nullable=True))
    _create_spend()
    _create_alerts()


def _create_spend() -> None:
    op.create_table(
        "monthly_spend",
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=True),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
            for name in ("requests", "tokens", "cost_high", "cost_low")
        ),
        sa.PrimaryKeyConstraint("owner_id", "month", "currency", "shard", name="pk_monthly_spend"),
    )
    op.create_index("ix_monthly_spend_tenant_id", "monthly_spend", ["tenant_id"])
    op.create_index("ix_monthly_spend_month", "monthly_spend", ["month"])
    for owner in ("usage_events.tenant_id", "usage_events.key_id"):
        op.execute(_SPENT.format(owner=owner, first_day=f"{datetime.now(UTC):%Y-%m}-01"))


def _create_alerts() -> None:
    op.create_table(
        "webhooks",
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner_id", name="pk_webhooks"),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("threshold", sa.String(100), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=True),
        sa.Column("webhook_owner_id", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=True),
        sa.Column("delivered_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("owner_id", "month", "threshold", name="pk_budget_alerts"),
    )
    op.create_index("ix_budget_alerts_due_at", "budget_alerts", ["due_at"])


def downgrade() -> None:
    op.drop_table("budget_alerts")
    op.drop_table("webhooks")
    op.drop_table("monthly_spend")
    with op.batch_alter_table("usage_events") as usage:
        usage.drop_column("end_user_id")
        usage.drop_column("organisation_id")
    op.drop_table("owner_quotas")
    with op.batch_alter_table("quotas") as quotas:
        for name in reversed(_MONEY):
            quotas.drop_column(name)
    op.drop_index("ix_tenants_organisation_id", "tenants")
    with op.batch_alter_table("tenants") as tenants:
        tenants.drop_column("organisation_id")
    op.drop_table("organisations")
