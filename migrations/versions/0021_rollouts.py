"""Adds the roll-outs of adapter versions, and what each gateway has counted in their steps."""

import sqlalchemy as sa
from alembic import op

revision = "0021_rollouts"
down_revision = "0020_alias_history"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_rollouts",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("stable", sa.Integer(), nullable=False),
        sa.Column("steps", sa.JSON(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("step_began_at", sa.Float(), nullable=False),
        sa.Column("change", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("reason", sa.String(500), nullable=True),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_rollouts"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_rollouts_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_rollouts_tenant_id", "adapter_rollouts", ["tenant_id"])
    op.create_index("ix_adapter_rollouts_adapter_id", "adapter_rollouts", ["adapter_id"])
    op.create_index("ix_adapter_rollouts_state", "adapter_rollouts", ["state"])
    op.create_table(
        "adapter_rollout_figures",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("gateway_id", sa.String(128), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("errors", sa.Integer(), nullable=False),
        sa.Column("refusals", sa.Integer(), nullable=False),
        sa.Column("first_tokens", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "gateway_id", "step", "version", name="pk_adapter_rollout_figures"),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["adapter_rollouts.id"],
            name="fk_adapter_rollout_figures_rollout_id_adapter_rollouts",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("adapter_rollout_figures")
    op.drop_table("adapter_rollouts")
