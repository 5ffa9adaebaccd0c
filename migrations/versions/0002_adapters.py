"""Creates the tables of adapters, of their versions and aliases, and of the digests of stored files."""

import sqlalchemy as sa
from alembic import op

revision = "0002_adapters"
down_revision = "0001_tenancy"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("next_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "adapter_artifacts",
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("claimed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_adapter_artifacts"),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("base_fingerprint", sa.String(80), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("target_modules", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_id", "digest", name="uq_adapter_versions_adapter_id_digest"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_versions_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["adapter_artifacts.digest"], name="fk_adapter_versions_digest_adapter_artifacts"
        ),
    )
    op.create_index("ix_adapter_versions_tenant_id", "adapter_versions", ["tenant_id"])
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_adapter_aliases"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_aliases_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_aliases_tenant_id", "adapter_aliases", ["tenant_id"])


def downgrade() -> None:
    op.drop_table("adapter_aliases")
    op.drop_table("adapter_versions")
    op.drop_table("adapter_artifacts")
    op.drop_table("adapters")
