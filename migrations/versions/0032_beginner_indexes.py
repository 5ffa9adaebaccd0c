"""Adds the indexes by which the open sessions of a key or an end user are counted. Sessions can be written meanwhile."""

import sqlalchemy as sa

from graftwork.migrations.online_indexes import create_index_online, drop_index_online

revision = "0032_beginner_indexes"
down_revision = "0031_beginners"
branch_labels = None
depends_on = None

_COLUMNS = ("key_id", "end_user_id")


def upgrade() -> None:
    for column in _COLUMNS:
        create_index_online(_name(column), "sessions", [column, "status"], where=sa.column(column).is_not(None))


def downgrade() -> None:
    for column in _COLUMNS:
        drop_index_online(_name(column), "sessions")


def _name(column: str) -> str:
    return f"ix_sessions_{column}_status"
