"""Adds what gateways and the supervisor of a fleet tell each other while the fleet has no engine."""

import sqlalchemy as sa
from alembic import op

revision = "0015_engine_demands"
down_revision = "0014_generations"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engine_demands",
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("offered_at", sa.Float(), nullable=False),
        sa.Column("asked_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model", name="pk_engine_demands"),
    )


def downgrade() -> None:
    op.drop_table("engine_demands")
