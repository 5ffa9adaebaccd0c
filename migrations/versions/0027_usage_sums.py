"""Adds sums of the usage ledger by hour and day, the batch and the unbilled tokens of its rows, and what engines reported.

No statement here reads or rewrites the rows of the ledger. The trigger needs the table's lock for an instant, so that all
rows without an entry in `usage_unrolled` are older than the trigger; the roll-up queues these later, in small parts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0027_usage_sums"
down_revision = "0026_people"
branch_labels = None
depends_on = None

_LOCK_WITHIN = "5s"
_KEY = {
    "tenant_id": sa.String(64),
    "span": sa.String(4),
    "dimension": sa.String(16),
    "start_at": sa.BigInteger(),
    "name": sa.String(400),
    "price_id": sa.String(64),
}
_SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "host_tokens",
    "disk_tokens",
    "completion_tokens",
    "adapter_bytes",
    "drafted_tokens",
    "forced_tokens",
    "reasoning_tokens",
    "engine_us",
    "kv_byte_seconds_high",
    "kv_byte_seconds_low",
    "cost_atoms_high",
    "cost_atoms_low",
    "kv_cost_atoms_high",
    "kv_cost_atoms_low",
)
_REPORTED = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "host_tokens",
    "disk_tokens",
    "kv_byte_seconds",
    "adapter_bytes",
    "engine_us",
)
_QUEUE = "INSERT INTO usage_unrolled (tenant_id, request_id) VALUES (NEW.tenant_id, NEW.request_id)"
_POSTGRES_TRIGGER = (
    f"CREATE FUNCTION queue_usage() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {_QUEUE}; RETURN NULL; END $$",
    "CREATE TRIGGER queue_usage AFTER INSERT ON usage_events FOR EACH ROW EXECUTE FUNCTION queue_usage()",
)
_SQLITE_TRIGGER = (f"CREATE TRIGGER queue_usage AFTER INSERT ON usage_events BEGIN {_QUEUE}; END",)
_STATE = """
INSERT INTO usage_rollup_state (id, is_complete) SELECT 1, NOT EXISTS (SELECT 1 FROM usage_events)
"""


def upgrade() -> None:
    if is_postgres := op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{_LOCK_WITHIN}'")
    op.add_column("usage_events", sa.Column("batch_id", sa.String(64), nullable=True))
    for name in ("unbilled_prompt_tokens", "unbilled_completion_tokens"):
        op.add_column("usage_events", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    _create_sums()
    _create_reports()
    for statement in _POSTGRES_TRIGGER if is_postgres else _SQLITE_TRIGGER:
        op.execute(statement)
    op.execute(_STATE)


def _create_sums() -> None:
    op.create_table(
        "usage_unrolled",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "request_id", name="pk_usage_unrolled"),
    )
    op.create_table(
        "usage_sums",
        *(sa.Column(name, kind, nullable=False) for name, kind in _KEY.items()),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.PrimaryKeyConstraint(*_KEY, name="pk_usage_sums"),
    )
    op.create_index("ix_usage_sums_span_dimension_start_at", "usage_sums", ["span", "dimension", "start_at"])
    op.create_table(
        "usage_rollup_state",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("after_tenant_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("after_request_id", sa.String(200), nullable=False, server_default=""),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        sa.Column("pruned_before", sa.BigInteger(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_usage_rollup_state"),
    )


def _create_reports() -> None:
    op.create_table(
        "engine_reports",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("domain", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("is_whole", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _REPORTED),
        sa.PrimaryKeyConstraint("id", name="pk_engine_reports"),
    )
    op.create_index("ix_engine_reports_request_id", "engine_reports", ["request_id"])
    op.create_index("ix_engine_reports_at", "engine_reports", ["at"])


def downgrade() -> None:
    op.drop_table("engine_reports")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER queue_usage ON usage_events")
        op.execute("DROP FUNCTION queue_usage()")
    else:
        op.execute("DROP TRIGGER queue_usage")
    for name in ("usage_rollup_state", "usage_sums", "usage_unrolled"):
        op.drop_table(name)
    for name in ("unbilled_completion_tokens", "unbilled_prompt_tokens", "batch_id"):
        op.drop_column("usage_events", name)
