"""Adds the degraded modes that the operator sets for all gateways."""

import sqlalchemy as sa
from alembic import op

revision = "0012_degraded_modes"
down_revision = "0011_hidden_items"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "degraded_modes",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("max_output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("suspend_drafts", sa.Boolean(), nullable=False),
        sa.Column("refuse_flex", sa.Boolean(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_degraded_modes"),
    )


def downgrade() -> None:
    op.drop_table("degraded_modes")
