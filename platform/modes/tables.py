"""Defines the SQL table of the degraded modes."""

from sqlalchemy import BigInteger, Boolean, Float, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class ModesRow(Base):
    """The degraded modes that the operator has set. There is at most one row, with the id `all`."""

    __tablename__ = "degraded_modes"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    max_output_tokens: Mapped[int | None] = mapped_column(BigInteger)
    suspend_drafts: Mapped[bool] = mapped_column(Boolean)
    refuse_flex: Mapped[bool] = mapped_column(Boolean)
    changed_at: Mapped[float] = mapped_column(Float)
