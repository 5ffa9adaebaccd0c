"""Notes which key began each session and pushed each adapter first, and for which end user, for limits of keys and users.

Rewrites no row: the columns are nullable, and what is older counts for no key and no end user.
"""

import sqlalchemy as sa
from alembic import op

revision = "0031_beginners"
down_revision = "0030_event_retention_index"
branch_labels = None
depends_on = None

_LOCK_WITHIN = "5s"
_TABLES = ("sessions", "adapters")
_COLUMNS = ("key_id", "end_user_id")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{_LOCK_WITHIN}'")
    for table in _TABLES:
        for column in _COLUMNS:
            op.add_column(table, sa.Column(column, sa.String(64), nullable=True))


def downgrade() -> None:
    for table in _TABLES:
        with op.batch_alter_table(table) as altered:
            for column in _COLUMNS:
                altered.drop_column(column)
