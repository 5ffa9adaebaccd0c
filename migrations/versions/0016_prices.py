"""Adds price lists, and to the usage ledger what costs need: cached tokens by tier, KV, adapters, tier, price and cost."""

import sqlalchemy as sa
from alembic import op

revision = "0016_prices"
down_revision = "0015_engine_demands"
branch_labels = None
depends_on = None

_COUNTS = ("host_tokens", "disk_tokens", "kv_byte_seconds", "adapter_bytes", "cost_atoms", "kv_cost_atoms")


def upgrade() -> None:
    op.create_table(
        "price_lists",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=True),
        sa.Column("service_tier", sa.String(16), nullable=True),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("rates", sa.JSON(), nullable=False),
        sa.Column("valid_from", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price_lists"),
    )
    for name in _COUNTS:
        op.add_column("usage_events", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("usage_events", sa.Column("service_tier", sa.String(16), nullable=True))
    op.add_column("usage_events", sa.Column("price_id", sa.String(64), nullable=True))
    has_session = sa.text("session_id IS NOT NULL")
    op.create_index(
        "ix_usage_events_session_id",
        "usage_events",
        ["session_id"],
        postgresql_where=has_session,
        sqlite_where=has_session,
    )


def downgrade() -> None:
    op.drop_index("ix_usage_events_session_id", "usage_events")
    with op.batch_alter_table("usage_events") as usage:
        for name in ("price_id", "service_tier", *reversed(_COUNTS)):
            usage.drop_column(name)
    op.drop_table("price_lists")
