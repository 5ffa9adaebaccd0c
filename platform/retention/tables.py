"""Defines the SQL table of the tenants' retention: for how many days their data is kept."""

from sqlalchemy import Float, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class RetentionRow(Base):
    """The retention of one tenant. NULL means for as long as the tenant exists. A tenant without a row keeps all."""

    __tablename__ = "tenant_retention"

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    session_days: Mapped[int | None] = mapped_column(Integer)
    response_days: Mapped[int | None] = mapped_column(Integer)
    file_days: Mapped[int | None] = mapped_column(Integer)
    usage_days: Mapped[int | None] = mapped_column(Integer)
    changed_at: Mapped[float] = mapped_column(Float)
    """Unix seconds."""
