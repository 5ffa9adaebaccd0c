"""Adds the tags and defaults of adapters, and the provenance of versions."""

import sqlalchemy as sa
from alembic import op

revision = "0022_adapter_details"
down_revision = "0021_rollouts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_tags",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("tag", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "tag", name="pk_adapter_tags"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_tags_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_tags_tenant_id", "adapter_tags", ["tenant_id", "tag"])
    op.add_column("adapters", sa.Column("defaults", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("adapter_versions", sa.Column("provenance", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("adapter_versions") as versions:
        versions.drop_column("provenance")
    with op.batch_alter_table("adapters") as adapters:
        adapters.drop_column("defaults")
    op.drop_table("adapter_tags")
