"""The registry's tables.

`adapter_artifacts` belongs to no tenant. It lists the digests that the artifact store may hold, and its rows are the
locks for writing and removing files. All other tables have a tenant column, which every statement uses.
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
    """The number of the next version. It only grows, so that a number always means the same weights."""
    created_at: Mapped[float] = mapped_column(Float)


class ArtifactRow(Base):
    """A digest whose files are in the artifact store, or will be soon."""

    __tablename__ = "adapter_artifacts"

    digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    claimed_at: Mapped[float] = mapped_column(Float)
    """The time of the last upload of these files."""


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
    """An alias and its target."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]]] = mapped_column(JSON)
    """The weights of a canary: [[version, weight], …] by ascending version."""
    updated_at: Mapped[float] = mapped_column(Float)
