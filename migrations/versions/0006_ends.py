"""Adds the time at which a session's own retention ends.

Also adds indexes for the searches for old sessions and old responses.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006_ends"
down_revision = "0005_provenance"
branch_labels = None
depends_on = None

_END_OF_EACH = """
    UPDATE sessions SET ends_at = CASE
        WHEN closed_at IS NOT NULL THEN closed_at + retention_s
        WHEN retention_s > 0 THEN updated_at + retention_s
    END
    WHERE status NOT IN ('running', 'expired')
"""


def upgrade() -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.add_column(sa.Column("ends_at", sa.Double(), nullable=True))
        sessions.create_index("ix_sessions_ends_at", ["ends_at"])
    op.execute(_END_OF_EACH)
    op.create_index("ix_responses_created_at", "responses", ["created_at"])


def downgrade() -> None:
    op.drop_index("ix_responses_created_at", "responses")
    with op.batch_alter_table("sessions") as sessions:
        sessions.drop_index("ix_sessions_ends_at")
        sessions.drop_column("ends_at")
