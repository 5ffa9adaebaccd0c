"""Adds what an API key allows, the key that replaces it, and the number of the latest change of access."""

import sqlalchemy as sa
from alembic import op

revision = "0018_key_rules"
down_revision = "0017_trace_switches"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("adapters", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("api_keys", sa.Column("allowed_ips", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("api_keys", sa.Column("replaced_by", sa.String(64), nullable=True))
    op.create_table(
        "access_changes",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_access_changes"),
    )


def downgrade() -> None:
    op.drop_table("access_changes")
    with op.batch_alter_table("api_keys") as keys:
        for column in ("replaced_by", "allowed_ips", "adapters"):
            keys.drop_column(column)
