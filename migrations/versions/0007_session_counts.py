"""Adds an index for counting sessions by status."""

from alembic import op

revision = "0007_session_counts"
down_revision = "0006_ends"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_sessions_kind_status", "sessions", ["kind", "status"])


def downgrade() -> None:
    op.drop_index("ix_sessions_kind_status", "sessions")
