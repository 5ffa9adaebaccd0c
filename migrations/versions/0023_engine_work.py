"""Adds to the usage ledger what the engine did for each request: drafts, forced tokens, reasoning, and time."""

import sqlalchemy as sa
from alembic import op

revision = "0023_engine_work"
down_revision = "0022_adapter_details"
branch_labels = None
depends_on = None

_COUNTS = ("drafted_tokens", "forced_tokens", "reasoning_tokens", "engine_us")


def upgrade() -> None:
    for name in _COUNTS:
        op.add_column("usage_events", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("usage_events") as usage:
        for name in reversed(_COUNTS):
            usage.drop_column(name)
