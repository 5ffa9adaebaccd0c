"""Adds people, the roles that were granted to them, the keys with which they act in tenants, and used sign-ins."""

import sqlalchemy as sa
from alembic import op

revision = "0026_people"
down_revision = "0025_batches"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "people",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("issuer", sa.String(500), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("email", sa.String(320), nullable=True),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("operator_role", sa.String(32), nullable=True),
        sa.Column("operator_hash", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("signed_in_at", sa.Float(), nullable=True),
        sa.Column("suspended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_people"),
    )
    op.create_index("ix_people_issuer_subject", "people", ["issuer", "subject"], unique=True)
    op.create_index("ix_people_email", "people", ["email"])
    op.create_table(
        "role_grants",
        sa.Column("person_id", sa.String(64), nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("granted_on", sa.String(64), nullable=False),
        sa.Column("granted_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("person_id", "role", "granted_on", name="pk_role_grants"),
    )
    op.create_index("ix_role_grants_granted_on", "role_grants", ["granted_on"])
    op.create_table(
        "spent_sign_ins",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("ends_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_spent_sign_ins"),
    )
    op.create_index("ix_spent_sign_ins_ends_at", "spent_sign_ins", ["ends_at"])
    op.add_column("api_keys", sa.Column("person_id", sa.String(64), nullable=True))
    op.create_index("ix_api_keys_person_id_tenant_id", "api_keys", ["person_id", "tenant_id"], unique=True)


def downgrade() -> None:
    # A key of a person cannot be told from others without the column, and nobody has its text: it must not stay.
    op.execute(sa.text("DELETE FROM api_keys WHERE person_id IS NOT NULL"))
    op.drop_index("ix_api_keys_person_id_tenant_id", table_name="api_keys")
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_column("person_id")
    op.drop_table("spent_sign_ins")
    op.drop_table("role_grants")
    op.drop_table("people")
