"""Adds the files that tenants upload, their batches of requests, and the answers of batches that run."""

import sqlalchemy as sa
from alembic import op

revision = "0025_batches"
down_revision = "0024_limits"
branch_labels = None
depends_on = None

_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("is_ready", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_id_id", "files", ["tenant_id", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("ending", sa.String(16), nullable=True),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("in_progress_at", sa.Float(), nullable=True),
        sa.Column("finalizing_at", sa.Float(), nullable=True),
        sa.Column("cancelling_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("total", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("succeeded", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("errored", sa.Integer(), nullable=False, server_default="0"),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in _TOKENS),
        sa.Column("model", sa.String(400), nullable=True),
        sa.Column("output_file_id", sa.String(64), nullable=True),
        sa.Column("error_file_id", sa.String(64), nullable=True),
        sa.Column("output_lives_s", sa.Float(), nullable=True),
        sa.Column("gateway", sa.String(128), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_tenant_id_id", "batches", ["tenant_id", "id"])
    op.create_index("ix_batches_input_file_id", "batches", ["input_file_id"])
    op.create_index("ix_batches_ended_at", "batches", ["ended_at"])
    op.create_table(
        "batch_answers",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("is_error", sa.Boolean(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line", name="pk_batch_answers"),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_batch_answers_batch_id_batches", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_batch_answers_tenant_id", "batch_answers", ["tenant_id"])
    for table in ("quotas", "owner_quotas"):
        op.add_column(table, sa.Column("max_file_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for table in ("quotas", "owner_quotas"):
        with op.batch_alter_table(table) as quotas:
            quotas.drop_column("max_file_bytes")
    op.drop_table("batch_answers")
    op.drop_table("batches")
    op.drop_table("files")
