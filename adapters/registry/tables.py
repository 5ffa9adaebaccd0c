"""The registry's tables.

`adapter_artifacts` belongs to no tenant: it says which digests the artifact store may hold, and its rows are the locks
under which files are written and removed. All others carry the tenant that every statement is scoped by.
"""

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class AdapterRow(Base):
    """A tenant's name for a line of versions."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(63))
    next_version: Mapped[int] = mapped_column(Integer)
    """Only grows, so that a number means one set of weights for ever."""
    created_at: Mapped[float] = mapped_column(Float)


class ArtifactRow(Base):
    """A digest whose files are, or are about to be, in the artifact store."""

    __tablename__ = "adapter_artifacts"

    digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    claimed_at: Mapped[float] = mapped_column(Float)
    """When an upload last asked for it."""


class AdapterVersionRow(Base):
    """One immutable version."""

    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter_id", "digest"),)

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    digest: Mapped[str] = mapped_column(String(80), ForeignKey("adapter_artifacts.digest"), index=True)
    base_fingerprint: Mapped[str] = mapped_column(String(80))
    rank: Mapped[int] = mapped_column(Integer)
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(Float)


class AdapterAliasRow(Base):
    """Where an alias leads."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]]] = mapped_column(JSON)
    """[[version, weight], …] by ascending version."""
    updated_at: Mapped[float] = mapped_column(Float)
