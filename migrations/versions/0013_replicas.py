"""Adds the leases of engines."""

import sqlalchemy as sa
from alembic import op

revision = "0013_replicas"
down_revision = "0012_degraded_modes"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("fingerprint", sa.String(128), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_replicas"),
    )


def downgrade() -> None:
    op.drop_table("replicas")
