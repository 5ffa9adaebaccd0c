"""Adds the generation of engines, which a rolling upgrade counts."""

import sqlalchemy as sa
from alembic import op

revision = "0014_generations"
down_revision = "0013_replicas"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("generation", sa.BigInteger(), nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("replicas", "generation")
