"""Defines the SQL tables of the adapter registry. Owns the columns. Never contains rules about adapters.

Every table except `adapter_artifacts` has a column for the tenant, and every statement over it names the tenant.
`adapter_artifacts` lists the digests whose files may be stored. A transaction locks the row of a digest before it
writes or removes the files.
"""

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class AdapterRow(Base):
    """An adapter of one tenant. Other tables contain its versions and aliases."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(63))
    next_version: Mapped[int] = mapped_column(Integer)
    """The number of the next version. It only increases, so the number of a deleted version is never used again."""
    created_at: Mapped[float] = mapped_column(Float)


class ArtifactRow(Base):
    """The digest of an adapter whose files are stored, or will be written next."""

    __tablename__ = "adapter_artifacts"

    digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    claimed_at: Mapped[float] = mapped_column(Float)
    """The time of the last upload of these files, in Unix seconds."""


class AdapterVersionRow(Base):
    """One version of an adapter. Its row never changes."""

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
    """An alias of an adapter, with the versions that are its target."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]]] = mapped_column(JSON)
    """The versions with their shares of the traffic: [[version, weight], …], sorted by version."""
    updated_at: Mapped[float] = mapped_column(Float)
