"""Creates the table of responses.

Adds the kind of a session, and the digest of a checkpoint's instructions and tools.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004_responses"
down_revision = "0003_sessions"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.add_column(sa.Column("kind", sa.String(32), nullable=False, server_default="session"))
        sessions.drop_index("ix_sessions_tenant_id_id")
        sessions.create_index("ix_sessions_tenant_id_kind_id", ["tenant_id", "kind", "id"])
    with op.batch_alter_table("sessions") as sessions:
        sessions.alter_column("kind", server_default=None)
    with op.batch_alter_table("checkpoints") as checkpoints:
        checkpoints.add_column(sa.Column("opening", sa.String(64), nullable=True))
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_responses_session_id_sessions"),
    )
    op.create_index("ix_responses_session_id", "responses", ["session_id"])


def downgrade() -> None:
    op.drop_table("responses")
    with op.batch_alter_table("checkpoints") as checkpoints:
        checkpoints.drop_column("opening")
    with op.batch_alter_table("sessions") as sessions:
        sessions.drop_index("ix_sessions_tenant_id_kind_id")
        sessions.create_index("ix_sessions_tenant_id_id", ["tenant_id", "id"])
        sessions.drop_column("kind")
