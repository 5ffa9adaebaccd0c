"""Defines the SQL tables of the adapter registry. Owns the columns. Never contains rules about adapters.

Every table except `adapter_artifacts` has a column for the tenant, and every statement over it names the tenant.
`adapter_artifacts` lists the digests whose files may be stored. A transaction locks the row of a digest before it
writes or removes the files.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, ForeignKey, Index, Integer, String, UniqueConstraint, false
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
    deleted_at: Mapped[float | None] = mapped_column(Float)
    """When the adapter was deleted, in Unix seconds; None if it was not. It can be restored until it is erased."""
    key_id: Mapped[str | None] = mapped_column(String(64))
    """The API key in whose limit the adapter counts, of the line of keys that pushed it first; NULL for others, and for
    older adapters.
    """
    end_user_id: Mapped[str | None] = mapped_column(String(64))
    """The end user for whom it was pushed first, as a digest; NULL for none."""
    defaults: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """What its requests have unless they say otherwise; see AdapterDefaults."""


class AdapterTagRow(Base):
    """A tag of an adapter."""

    __tablename__ = "adapter_tags"
    __table_args__ = (Index("ix_adapter_tags_tenant_id", "tenant_id", "tag"),)

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))


class ArtifactRow(Base):
    """The digest of an adapter whose files are stored, or will be written next."""

    __tablename__ = "adapter_artifacts"

    digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    claimed_at: Mapped[float] = mapped_column(Float)
    """The time of the last upload of these files, in Unix seconds."""


class AdapterVersionRow(Base):
    """One version of an adapter. Its weights never change."""

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
    deleted_at: Mapped[float | None] = mapped_column(Float)
    """When the version was deleted, in Unix seconds; None if it was not. It can be restored until it is erased."""
    is_held: Mapped[bool] = mapped_column(Boolean, server_default=false())
    """Whether the adapter's plain name passes this version over. Aliases and `name@3` lead to it all the same."""
    provenance: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Where the version comes from; see Provenance. None for versions that are older than this column."""


class AdapterAliasRow(Base):
    """An alias of an adapter, with the versions that are its target."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]]] = mapped_column(JSON)
    """The versions with their shares of the traffic: [[version, weight], …], sorted by version."""
    updated_at: Mapped[float] = mapped_column(Float)


class AliasChangeRow(Base):
    """One change of an alias's target. Rows are added, and go only with their adapter."""

    __tablename__ = "adapter_alias_changes"

    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """The number of the change among those of the alias, from 1."""
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    weights: Mapped[list[list[float]] | None] = mapped_column(JSON(none_as_null=True))
    """The new target; None if the alias was removed."""
    returns_to: Mapped[int | None] = mapped_column(Integer)
    """The number of the change whose target a rollback from this one restores; None if there is none."""
    reason: Mapped[str] = mapped_column(String(32))
    """`set`, `removed`, `rollback`, or what a roll-out did."""
    actor: Mapped[str] = mapped_column(String(200))
    at: Mapped[float] = mapped_column(Float)


class RolloutRow(Base):
    """A roll-out of a version to an alias, and which gateway advances it."""

    __tablename__ = "adapter_rollouts"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    adapter_id: Mapped[str] = mapped_column(String(64), ForeignKey("adapters.id", ondelete="CASCADE"), index=True)
    alias: Mapped[str] = mapped_column(String(63))
    version: Mapped[int] = mapped_column(Integer)
    stable: Mapped[int] = mapped_column(Integer)
    """The version that the alias led to before."""
    steps: Mapped[list[list[float]]] = mapped_column(JSON)
    """[[weight in percent, seconds], …]."""
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16), index=True)
    step: Mapped[int] = mapped_column(Integer)
    """The index of the step that runs, or that ran last."""
    step_began_at: Mapped[float] = mapped_column(Float)
    change: Mapped[int] = mapped_column(Integer)
    """The number of the alias's change that the roll-out made last."""
    created_at: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str | None] = mapped_column(String(500))
    lease_owner: Mapped[str | None] = mapped_column(String(128))
    """The gateway that advances the roll-out; None if none has yet."""
    lease_until: Mapped[float] = mapped_column(Float, server_default="0")


class RolloutFiguresRow(Base):
    """What one gateway has counted of one version in one step of a roll-out."""

    __tablename__ = "adapter_rollout_figures"

    rollout_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("adapter_rollouts.id", ondelete="CASCADE"), primary_key=True
    )
    gateway_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    requests: Mapped[int] = mapped_column(Integer)
    errors: Mapped[int] = mapped_column(Integer)
    refusals: Mapped[int] = mapped_column(Integer)
    first_tokens: Mapped[dict[str, int]] = mapped_column(JSON)
    """Requests by the bucket of their seconds to the first token."""
