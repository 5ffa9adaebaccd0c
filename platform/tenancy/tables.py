"""Defines the SQL tables of the platform: tenants, API keys, limits, the audit log and idempotency keys.

All times are seconds since the Unix epoch. Ids are text with a prefix, and sort by the time of their creation.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.contents.columns import CONTENT
from graftwork.platform.database import Base


class TenantRow(Base):
    """A tenant. The row of a deleted tenant stays, so that the tenant's usage records still have a name."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(String(16))
    weight: Mapped[float] = mapped_column(Float)
    service_tier_ceiling: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float] = mapped_column(Float)
    deleted_at: Mapped[float | None] = mapped_column(Float)
    erased_at: Mapped[float | None] = mapped_column(Float)
    """The time at which everything of the deleted tenant was erased."""
    organisation_id: Mapped[str | None] = mapped_column(String(64), index=True)
    """The organisation that the tenant belongs to; NULL for none."""


class OrganisationRow(Base):
    """A group of tenants that share limits."""

    __tablename__ = "organisations"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[float] = mapped_column(Float)


class ApiKeyRow(Base):
    """An API key of a tenant. The server finds the row by the key's public id, and checks the key by its hash."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(200))
    public_id: Mapped[str] = mapped_column(String(64), unique=True)
    key_hash: Mapped[bytes] = mapped_column(LargeBinary)
    scopes: Mapped[list[str]] = mapped_column(JSON)
    adapters: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The models that the key may name; NULL means all."""
    allowed_ips: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The networks from which the key may be used; NULL means all."""
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float | None] = mapped_column(Float)
    revoked_at: Mapped[float | None] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    replaced_by: Mapped[str | None] = mapped_column(String(64))
    """The id of the key that a rotation has made instead of this one."""
    person_id: Mapped[str | None] = mapped_column(String(64))
    """The person who acts in the tenant with this key, whose text nobody has; NULL for a key of a program."""
    first_key_id: Mapped[str | None] = mapped_column(String(64))
    """The first of the keys that rotations have replaced by one another up to this one; NULL for that key itself."""
    __table_args__ = (Index("ix_api_keys_person_id_tenant_id", "person_id", "tenant_id", unique=True),)


class AccessChangesRow(Base):
    """How often the access of a key or a tenant has been changed. The table has one row, from the first change on."""

    __tablename__ = "access_changes"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)


class QuotaColumns:
    """The limits of one owner. NULL means that there is no limit. The names are the fields of `Quota`."""

    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    max_concurrent_requests: Mapped[int | None] = mapped_column(BigInteger)
    max_adapters: Mapped[int | None] = mapped_column(BigInteger)
    max_adapter_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_adapter_rank: Mapped[int | None] = mapped_column(BigInteger)
    max_sessions: Mapped[int | None] = mapped_column(BigInteger)
    max_device_kv_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_host_kv_bytes: Mapped[int | None] = mapped_column(BigInteger)
    monthly_tokens: Mapped[int | None] = mapped_column(BigInteger)
    max_file_bytes: Mapped[int | None] = mapped_column(BigInteger)
    monthly_budget: Mapped[str | None] = mapped_column(String(32))
    """This and the next are amounts of money as decimal text, because a float would lose digits."""
    soft_budget: Mapped[str | None] = mapped_column(String(32))
    currency: Mapped[str | None] = mapped_column(String(3))


class QuotaRow(QuotaColumns, Base):
    """The limits of one tenant. A tenant without a row has no limits."""

    __tablename__ = "quotas"

    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)


class OwnerQuotaRow(QuotaColumns, Base):
    """The limits of an organisation, a key, an end user, or of each end user of a tenant."""

    __tablename__ = "owner_quotas"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The id of the organisation, key or end user; that of the tenant for each of its end users."""
    level: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[str | None] = mapped_column(String(64), index=True)
    """The tenant of the key or end user; NULL for an organisation."""


class AuditRow(Base):
    """One action of an administrator or of a key on adapters. Rows are never deleted; an erased tenant's lose adapters' names."""

    __tablename__ = "audit_entries"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    actor: Mapped[str] = mapped_column(String(200))
    action: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    target: Mapped[str] = mapped_column(String(200))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)


class IdempotencyRow(Base):
    """An idempotency key that is in use, and the digest of the request that used it first.

    The row also has the answer to this request, once the request was executed. From the start of a turn on, `body`
    names the turn that answers the request; `status` stays NULL until the answer is certain.
    """

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_digest: Mapped[str] = mapped_column(String(64))
    claim: Mapped[str] = mapped_column(String(64))
    """The id of the attempt that has reserved the key."""
    gateway: Mapped[str | None] = mapped_column(String(64))
    """The gateway that executes the request. Without a body, the row is valid for as long as this gateway is alive."""
    status: Mapped[int | None] = mapped_column(Integer)
    body: Mapped[bytes | None] = mapped_column(LargeBinary, info=CONTENT)
    created_at: Mapped[float] = mapped_column(Float, index=True)
