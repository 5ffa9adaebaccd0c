"""Adds when a tenant was deleted and erased, and the indexes that deleting checkpoints and turns needs."""

import sqlalchemy as sa
from alembic import op

revision = "0009_erasure"
down_revision = "0008_delivered_tokens"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("deleted_at", sa.Float(), nullable=True))
    op.add_column("tenants", sa.Column("erased_at", sa.Float(), nullable=True))
    op.create_index("ix_checkpoints_turn_id", "checkpoints", ["turn_id"])
    op.create_index("ix_tool_calls_checkpoint_id", "tool_calls", ["checkpoint_id"])


def downgrade() -> None:
    op.drop_index("ix_tool_calls_checkpoint_id", "tool_calls")
    op.drop_index("ix_checkpoints_turn_id", "checkpoints")
    with op.batch_alter_table("tenants") as tenants:
        tenants.drop_column("erased_at")
        tenants.drop_column("deleted_at")
