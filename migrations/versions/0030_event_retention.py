"""Notes which turns may have events, so that the sweep finds those whose events are too old.

Rewrites no row: the column has a constant default.
"""

import sqlalchemy as sa
from alembic import op

revision = "0030_event_retention"
down_revision = "0029_data_rights"
branch_labels = None
depends_on = None

_LOCK_WITHIN = "5s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{_LOCK_WITHIN}'")
    op.add_column("turns", sa.Column("has_events", sa.Boolean(), nullable=False, server_default=sa.true()))


def downgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("has_events")
