"""Adds the gateways that run, and which of them holds an idempotency key whose request has no answer yet."""

import sqlalchemy as sa
from alembic import op

revision = "0010_gateways"
down_revision = "0009_erasure"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gateways"),
    )
    op.add_column("idempotency_keys", sa.Column("gateway", sa.String(64), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.drop_column("gateway")
    op.drop_table("gateways")
