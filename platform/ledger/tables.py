"""Defines the SQL tables of the usage ledger: its rows, their sums, and what was spent in a month. All times are seconds
since the Unix epoch.
"""

from sqlalchemy import BigInteger, Boolean, Float, Index, Integer, String, text
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
    batch_id: Mapped[str | None] = mapped_column(String(64))
    """The batch that the request belongs to; NULL for none."""
    unbilled_prompt_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Prompt tokens that the engine has reported for the request and that nobody pays: the prompt of further answers to
    the same prompt, and everything of a request that the server has failed.
    """
    unbilled_completion_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Generated tokens that nobody pays: those after a stop string, and those of a request that the server has failed."""


class UnrolledUsageRow(Base):
    """A row of the usage ledger that is not yet in `usage_sums`.

    A trigger adds one for each new row of the ledger, in the same transaction, so rows of older gateways and of COPY
    have one too. The roll-up removes it in the transaction in which it adds the row to the sums.
    """

    __tablename__ = "usage_unrolled"

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(200), primary_key=True)


class UsageSumRow(Base):
    """The usage of a tenant's requests of one hour or one day in UTC that have one name, such as one key.

    Each request is in one sum for each dimension and span, and a report reads one dimension. Sums of all combinations of
    names would be about as many as the requests.
    """

    __tablename__ = "usage_sums"
    __table_args__ = (Index(None, "span", "dimension", "start_at"),)

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    span: Mapped[str] = mapped_column(String(4), primary_key=True)
    """`hour` or `day`."""
    dimension: Mapped[str] = mapped_column(String(16), primary_key=True)
    """What `name` is (see `rollup_rows.py`)."""
    start_at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The beginning of the hour or day."""
    name: Mapped[str] = mapped_column(String(400), primary_key=True)
    """Empty for NULL, as is the next column."""
    price_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    host_tokens: Mapped[int] = mapped_column(BigInteger)
    disk_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    adapter_bytes: Mapped[int] = mapped_column(BigInteger)
    drafted_tokens: Mapped[int] = mapped_column(BigInteger)
    forced_tokens: Mapped[int] = mapped_column(BigInteger)
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger)
    engine_us: Mapped[int] = mapped_column(BigInteger)
    kv_byte_seconds_high: Mapped[int] = mapped_column(BigInteger)
    """The sum of the ledger's column in parts: each value's whole multiples of 10⁹, and in the next column the rests.
    Together they may need more than 64 bits.
    """
    kv_byte_seconds_low: Mapped[int] = mapped_column(BigInteger)
    cost_atoms_high: Mapped[int] = mapped_column(BigInteger)
    cost_atoms_low: Mapped[int] = mapped_column(BigInteger)
    kv_cost_atoms_high: Mapped[int] = mapped_column(BigInteger)
    kv_cost_atoms_low: Mapped[int] = mapped_column(BigInteger)


class RollupStateRow(Base):
    """How far the rows that are older than the sums have been queued for them. There is one such row."""

    __tablename__ = "usage_rollup_state"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    after_tenant_id: Mapped[str] = mapped_column(String(64), server_default="")
    """All rows up to this tenant and request, in the order of the primary key, are queued or in the sums."""
    after_request_id: Mapped[str] = mapped_column(String(200), server_default="")
    is_complete: Mapped[bool] = mapped_column(Boolean)
    """Whether all rows of the ledger are: then reports read the sums."""
    pruned_before: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Rows of requests before this time may have been deleted; their sums are kept."""


class EngineReportRow(Base):
    """What one engine has reported to a gateway about one request that it ran.

    It is written apart from the ledger, so that the two can be compared. A request has several if it has several answers,
    or if it went from one engine to another.
    """

    __tablename__ = "engine_reports"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(200), index=True)
    """The request that the ledger knows."""
    choice: Mapped[int] = mapped_column(Integer)
    """The number of the answer, from 0."""
    domain: Mapped[str] = mapped_column(String(64))
    """The isolation domain of the tenant, in hexadecimal."""
    at: Mapped[float] = mapped_column(Float, index=True)
    """When the engine's work ended, or when it was found to have ended."""
    is_whole: Mapped[bool] = mapped_column(Boolean)
    """Whether the gateway was alive at the end of the request."""
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    host_tokens: Mapped[int] = mapped_column(BigInteger)
    disk_tokens: Mapped[int] = mapped_column(BigInteger)
    kv_byte_seconds: Mapped[int] = mapped_column(BigInteger)
    adapter_bytes: Mapped[int] = mapped_column(BigInteger)
    engine_us: Mapped[int] = mapped_column(BigInteger)


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
