"""Notes for each API key the first of those that rotations have replaced up to it: all of them share its limits.

Rewrites no row: the column is nullable, and a key that was made by an earlier rotation keeps limits of its own.
"""

import sqlalchemy as sa
from alembic import op

revision = "0033_lines_of_keys"
down_revision = "0032_beginner_indexes"
branch_labels = None
depends_on = None

_LOCK_WITHIN = "5s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{_LOCK_WITHIN}'")
    op.add_column("api_keys", sa.Column("first_key_id", sa.String(64), nullable=True))


def downgrade() -> None:
    """Gives each key the limits that it shares, because an older version looks for them under the key's own id."""
    limits = sa.table(
        "owner_quotas", *(sa.column(each["name"]) for each in sa.inspect(op.get_bind()).get_columns("owner_quotas"))
    )
    keys = sa.table("api_keys", sa.column("id"), sa.column("first_key_id"))
    shared = [keys.c.id if column.name == "owner_id" else column for column in limits.c]
    copies = sa.select(*shared).join_from(keys, limits, limits.c.owner_id == keys.c.first_key_id)
    op.execute(limits.insert().from_select([column.name for column in limits.c], copies))
    with op.batch_alter_table("api_keys") as altered:
        altered.drop_column("first_key_id")
