"""Adds the traces of requests that have ended, which all gateways share for some minutes."""

import sqlalchemy as sa
from alembic import op

revision = "0019_request_traces"
down_revision = "0018_key_rules"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "request_traces",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("client_request_id", sa.String(128), nullable=True),
        sa.Column("work_id", sa.String(64), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_request_traces"),
    )
    op.create_index("ix_request_traces_tenant_id_ended_at", "request_traces", ["tenant_id", "ended_at"])
    op.create_index("ix_request_traces_ended_at", "request_traces", ["ended_at"])


def downgrade() -> None:
    op.drop_table("request_traces")
