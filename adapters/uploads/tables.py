"""Defines the SQL table of uploads in parts and of fetches. Owns the columns. Never contains rules about them."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class AdapterUploadRow(Base):
    """A version of an adapter whose bytes are still on their way. The bytes are in a folder of the gateway."""

    __tablename__ = "adapter_uploads"
    __table_args__ = (
        Index("ix_adapter_uploads_tenant_id_id", "tenant_id", "id"),
        Index("ix_adapter_uploads_status", "status"),
        Index("ix_adapter_uploads_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(63))
    status: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str | None] = mapped_column(String(80))
    source: Mapped[str | None] = mapped_column(Text)
    """The source as its URL, which may hold a signature: it is never shown."""
    push: Mapped[dict[str, Any]] = mapped_column(JSON)
    """Who pushes the version, and how; see Push."""
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    version: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    """How often a gateway has begun to fetch."""
    next_at: Mapped[float] = mapped_column(Float, server_default="0")
    """When a gateway may begin to fetch, in Unix seconds."""
    lease_owner: Mapped[str | None] = mapped_column(String(128))
    """The gateway that fetches; None if none does."""
    lease_until: Mapped[float] = mapped_column(Float, server_default="0")
