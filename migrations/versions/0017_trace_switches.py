"""Adds the tenants and sessions whose requests the operator has switched the tracing of."""

import sqlalchemy as sa
from alembic import op

revision = "0017_trace_switches"
down_revision = "0016_prices"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trace_switches",
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("token_ids", sa.Boolean(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("target", name="pk_trace_switches"),
    )


def downgrade() -> None:
    op.drop_table("trace_switches")
