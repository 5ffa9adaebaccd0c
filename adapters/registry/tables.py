"""Defines the tables of the registry. Owns the columns. Never contains rules about adapters.

Every table has a tenant column, which every statement uses, except `adapter_artifacts`. That table lists the digests
whose files the artifact store may have. Its rows are the locks for writing and removing these files.
"""

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class AdapterRow(Base):
    """An adapter of a tenant. Its versions and aliases are in other tables."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(63))
    next_version: Mapped[int] = mapped_column(Integer)
    """The number of the next version. It only rises, so that a number always means the same weights."""
    created_at: Mapped[float] = mapped_column(Float)


class ArtifactRow(Base):
    """A digest whose files are in the artifact store, or are about to be written."""

    __tablename__ = "adapter_artifacts"

    digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    claimed_at: Mapped[float] = mapped_column(Float)
    """The time of the last upload of these files, in Unix seconds."""


class AdapterVersionRow(Base):
    """One immutable version of an adapter."""

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
    """An alias of an adapter, and the versions to which it points."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]]] = mapped_column(JSON)
    """The versions with their shares of the traffic: [[version, weight], …], sorted by version."""
    updated_at: Mapped[float] = mapped_column(Float)
