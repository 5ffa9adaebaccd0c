"""Defines the SQL table of the tenants' data keys. Times are in Unix seconds."""

from sqlalchemy import Float, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class DataKeyRow(Base):
    """The data key of one tenant, wrapped by a master key. Without the row, what the tenant has encrypted is noise."""

    __tablename__ = "data_keys"

    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    master_id: Mapped[str] = mapped_column(String(64), index=True)
    """The master key that has wrapped the data key."""
    wrapped: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[float] = mapped_column(Float)
