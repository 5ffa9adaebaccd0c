"""Adds the index by which the sweep finds turns with old events. Turns can be written while it is built."""

import sqlalchemy as sa

from graftwork.migrations.online_indexes import create_index_online, drop_index_online

revision = "0030_event_retention_index"
down_revision = "0030_event_retention"
branch_labels = None
depends_on = None

_HAS_EVENTS = sa.column("has_events", sa.Boolean()).is_(sa.true())
_NAME = "ix_turns_finished_at_id"


def upgrade() -> None:
    create_index_online(_NAME, "turns", ["finished_at", "id"], where=_HAS_EVENTS)


def downgrade() -> None:
    drop_index_online(_NAME, "turns")
