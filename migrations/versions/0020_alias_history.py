"""Adds the history of aliases, when adapters and versions were deleted, and which versions a plain name passes over.

The history of an alias that exists begins with its present target.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020_alias_history"
down_revision = "0019_request_traces"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_alias_changes",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("weights", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("returns_to", sa.Integer(), nullable=True),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "number", name="pk_adapter_alias_changes"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_alias_changes_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_alias_changes_tenant_id", "adapter_alias_changes", ["tenant_id"])
    op.execute(
        "INSERT INTO adapter_alias_changes"
        " (adapter_id, alias, number, tenant_id, weights, returns_to, reason, actor, at)"
        " SELECT adapter_id, alias, 1, tenant_id, weights, NULL, 'set', 'unknown', updated_at FROM adapter_aliases"
    )
    op.add_column("adapters", sa.Column("deleted_at", sa.Float(), nullable=True))
    op.add_column("adapter_versions", sa.Column("deleted_at", sa.Float(), nullable=True))
    op.add_column("adapter_versions", sa.Column("is_held", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.execute("DELETE FROM adapters WHERE deleted_at IS NOT NULL")
    op.execute("DELETE FROM adapter_versions WHERE deleted_at IS NOT NULL")
    with op.batch_alter_table("adapter_versions") as versions:
        versions.drop_column("is_held")
        versions.drop_column("deleted_at")
    with op.batch_alter_table("adapters") as adapters:
        adapters.drop_column("deleted_at")
    op.drop_table("adapter_alias_changes")
