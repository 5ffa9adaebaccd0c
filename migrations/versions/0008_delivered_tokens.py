"""Adds what is needed to bill a turn whose process has died: its key, and the answer's tokens up to each event."""

import sqlalchemy as sa
from alembic import op

revision = "0008_delivered_tokens"
down_revision = "0007_session_counts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("key_id", sa.String(64), nullable=True))
    op.add_column("events", sa.Column("answer_tokens", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("events") as events:
        events.drop_column("answer_tokens")
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("key_id")
