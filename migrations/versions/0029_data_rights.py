"""Adds the exports of everything that a tenant has, how long a tenant's data is kept, and the keys that encrypt it."""

import sqlalchemy as sa
from alembic import op

revision = "0029_data_rights"
down_revision = "0028_adapter_uploads"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exports",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("requested_by", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("error_code", sa.String(64), nullable=True),
        sa.Column("error_message", sa.String(1000), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("gateway", sa.String(128), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_exports"),
    )
    op.create_index("ix_exports_tenant_id_id", "exports", ["tenant_id", "id"])
    op.create_index("ix_exports_status", "exports", ["status"])
    op.create_index("ix_exports_expires_at", "exports", ["expires_at"])
    op.create_table(
        "tenant_retention",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_days", sa.Integer(), nullable=True),
        sa.Column("response_days", sa.Integer(), nullable=True),
        sa.Column("file_days", sa.Integer(), nullable=True),
        sa.Column("usage_days", sa.Integer(), nullable=True),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenant_retention"),
    )
    op.create_table(
        "data_keys",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("master_id", sa.String(64), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_data_keys"),
    )
    op.create_index("ix_data_keys_master_id", "data_keys", ["master_id"])


def downgrade() -> None:
    op.drop_table("data_keys")
    op.drop_table("tenant_retention")
    op.drop_table("exports")
