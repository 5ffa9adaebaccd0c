"""Adds the uploads of adapters in parts, and the fetches of adapters from sources."""

import sqlalchemy as sa
from alembic import op

revision = "0028_adapter_uploads"
down_revision = "0027_usage_sums"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_uploads",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(80), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("push", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("next_at", sa.Float(), nullable=False, server_default="0"),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_uploads"),
    )
    op.create_index("ix_adapter_uploads_tenant_id_id", "adapter_uploads", ["tenant_id", "id"])
    op.create_index("ix_adapter_uploads_status", "adapter_uploads", ["status"])
    op.create_index("ix_adapter_uploads_expires_at", "adapter_uploads", ["expires_at"])


def downgrade() -> None:
    op.drop_table("adapter_uploads")
