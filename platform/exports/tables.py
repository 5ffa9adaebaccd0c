"""Defines the SQL table of exports. All times are seconds since the Unix epoch."""

from sqlalchemy import BigInteger, Float, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class ExportRow(Base):
    """An export of everything that a tenant has. Its archive is in the folder of exports, under the same id."""

    __tablename__ = "exports"
    __table_args__ = (Index(None, "tenant_id", "id"), Index(None, "status"), Index(None, "expires_at"))

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))
    requested_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    expires_at: Mapped[float | None] = mapped_column(Float)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str | None] = mapped_column(String(64))
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(String(1000))
    attempts: Mapped[int] = mapped_column(Integer)
    """How often the export was begun and did not end."""
    gateway: Mapped[str | None] = mapped_column(String(128))
    """The gateway that makes the export, for as long as that gateway is alive."""
    epoch: Mapped[int] = mapped_column(Integer)
    """How often a gateway has claimed the export. Only the last claim may change it."""
