"""Creates the tables of sessions, turns, checkpoints, items, tool calls and events."""

import sqlalchemy as sa
from alembic import op

revision = "0003_sessions"
down_revision = "0002_adapters"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("model", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("retention_s", sa.Double(), nullable=True),
        sa.Column("head_id", sa.String(64), nullable=True),
        sa.Column("origin_id", sa.String(64), nullable=True),
        sa.Column("forked_from", sa.String(64), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("running_turn_id", sa.String(64), nullable=True),
        sa.Column("lease_owner", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_cache", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_tenant_id_id", "sessions", ["tenant_id", "id"])
    op.create_index("ix_sessions_status_lease_expires_at", "sessions", ["status", "lease_expires_at"])
    op.create_table(
        "turns",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("parent_id", sa.String(64), nullable=True),
        sa.Column("checkpoint_id", sa.String(64), nullable=True),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("input", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("usage", sa.JSON(), nullable=True),
        sa.Column("cache", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_turns"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_turns_session_id_sessions"),
    )
    op.create_index("ix_turns_session_id_id", "turns", ["session_id", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("parent_id", sa.String(64), nullable=True),
        sa.Column("turn_id", sa.String(64), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_answer_items", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("awaits_tools", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_checkpoints_session_id_sessions"),
        sa.ForeignKeyConstraint(["parent_id"], ["checkpoints.id"], name="fk_checkpoints_parent_id_checkpoints"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name="fk_checkpoints_turn_id_turns"),
    )
    op.create_index("ix_checkpoints_session_id", "checkpoints", ["session_id"])
    op.create_index("ix_checkpoints_parent_id", "checkpoints", ["parent_id"])
    op.create_table(
        "items",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("checkpoint_id", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_items"),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_items_checkpoint_id_checkpoints"),
    )
    op.create_index("ix_items_checkpoint_id_position", "items", ["checkpoint_id", "position"], unique=True)
    op.create_table(
        "tool_calls",
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("checkpoint_id", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("call_id", sa.String(64), nullable=False),
        sa.Column("name", sa.JSON(), nullable=False),
        sa.Column("arguments", sa.JSON(), nullable=False),
        sa.Column("output", sa.JSON(), nullable=True),
        sa.Column("answered_at", sa.Double(), nullable=True),
        sa.Column("turn_id", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("session_id", "checkpoint_id", "position", name="pk_tool_calls"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_tool_calls_session_id_sessions"),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_tool_calls_checkpoint_id_checkpoints"),
    )
    op.create_index("ix_tool_calls_session_id_call_id", "tool_calls", ["session_id", "call_id"])
    op.create_table(
        "events",
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("turn_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "seq", name="pk_events"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_events_session_id_sessions"),
    )


def downgrade() -> None:
    op.drop_table("events")
    op.drop_table("tool_calls")
    op.drop_table("items")
    op.drop_table("checkpoints")
    op.drop_table("turns")
    op.drop_table("sessions")
