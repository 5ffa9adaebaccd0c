"""Adds what each turn was made with (weights, template, sampling), and the time at which a tool's output is due."""

import sqlalchemy as sa
from alembic import op

revision = "0005_provenance"
down_revision = "0004_responses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.add_column(sa.Column("made_with", sa.JSON(), nullable=True))
    with op.batch_alter_table("tool_calls") as calls:
        calls.add_column(sa.Column("deadline_at", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("tool_calls") as calls:
        calls.drop_column("deadline_at")
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("made_with")
