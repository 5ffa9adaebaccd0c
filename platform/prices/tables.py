"""Defines the SQL table of price lists."""

from sqlalchemy import JSON, Float, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class PriceListRow(Base):
    """A price list. Rows are added, and never changed or deleted, because rows of the usage ledger name them."""

    __tablename__ = "price_lists"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(String(64))
    service_tier: Mapped[str | None] = mapped_column(String(16))
    currency: Mapped[str] = mapped_column(String(3))
    rates: Mapped[dict[str, str]] = mapped_column(JSON)
    """The rates as decimal text, by name. Numbers in JSON would be floats."""
    valid_from: Mapped[float] = mapped_column(Float)
    created_at: Mapped[float] = mapped_column(Float)
