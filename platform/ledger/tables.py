"""Defines the SQL table of the usage ledger. All times are seconds since the Unix epoch."""

from sqlalchemy import BigInteger, Float, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base

_HAS_SESSION = text("session_id IS NOT NULL")


class UsageRow(Base):
    """The usage of one request: a row of the usage ledger.

    The row has no foreign keys, because it stays when its API key, session, adapter or tenant is deleted.
    """

    __tablename__ = "usage_events"
    __table_args__ = (
        Index(None, "tenant_id", "at"),
        Index("ix_usage_events_session_id", "session_id", postgresql_where=_HAS_SESSION, sqlite_where=_HAS_SESSION),
    )

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(400))
    adapter: Mapped[str | None] = mapped_column(String(400))
    session_id: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float)
    day: Mapped[str] = mapped_column(String(10))
    """The date of `at` in UTC. The date is stored, because the two databases round times differently."""
    host_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    disk_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    kv_byte_seconds: Mapped[int] = mapped_column(BigInteger, server_default="0")
    adapter_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    drafted_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    forced_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    engine_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    service_tier: Mapped[str | None] = mapped_column(String(16))
    price_id: Mapped[str | None] = mapped_column(String(64))
    cost_atoms: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """The cost in atoms: 10⁻¹² of the price list's currency. It is a whole number, because both databases add whole
    numbers exactly.
    """
    kv_cost_atoms: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """The part of the cost for KV."""
    organisation_id: Mapped[str | None] = mapped_column(String(64))
    """The organisation that the tenant belonged to when the request began; NULL for none."""
    end_user_id: Mapped[str | None] = mapped_column(String(64))
    """The end user that the request named, as a digest; NULL for none."""


class MonthlySpendRow(Base):
    """A part of what one owner of limits has used in one month: the sum of the parts (shards) is what it has used.

    A row of the usage ledger is added to one part of each of its owners, in the same transaction. With several parts,
    requests that end at the same time rarely wait for each other.
    """

    __tablename__ = "monthly_spend"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The id of an organisation, a tenant, a key or an end user."""
    month: Mapped[str] = mapped_column(String(7), primary_key=True, index=True)
    """The month of `UsageRow.day`, as `2026-11`."""
    currency: Mapped[str] = mapped_column(String(3), primary_key=True)
    """The currency of the cost; empty for requests without a price."""
    shard: Mapped[int] = mapped_column(Integer, primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(String(64), index=True)
    """The tenant of the owner; NULL for an organisation."""
    requests: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_high: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """The cost in 10⁹ atoms, and in the next column the rest in atoms: together they may need more than 64 bits."""
    cost_low: Mapped[int] = mapped_column(BigInteger, server_default="0")
