"""Adds the index by which the sweep finds turns with old events. Turns can be written while it is built."""

from graftwork.migrations.online_indexes import create_index_online, drop_index_online

revision = "0030_event_retention_index"
down_revision = "0030_event_retention"
branch_labels = None
depends_on = None

_NAME = "ix_turns_finished_at_id"


def upgrade() -> None:
    create_index_online(_NAME, "turns", ["finished_at", "id"], where="has_events")


def downgrade() -> None:
    drop_index_online(_NAME, "turns")
