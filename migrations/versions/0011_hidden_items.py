"""Adds the items that a conversation hides from its later prompts, because its client deleted them."""

import sqlalchemy as sa
from alembic import op

revision = "0011_hidden_items"
down_revision = "0010_gateways"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "hidden_items",
        sa.Column("checkpoint_id", sa.String(64), nullable=False),
        sa.Column("item_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_hidden_items_checkpoint_id_checkpoints"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "item_id", name="pk_hidden_items"),
    )


def downgrade() -> None:
    op.drop_table("hidden_items")
