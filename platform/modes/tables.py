"""Defines the SQL tables of the degraded modes and of the switches of traces."""

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


class TraceSwitchRow(Base):
    """A tenant or a session whose requests are traced, by its id."""

    __tablename__ = "trace_switches"

    target: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_ids: Mapped[bool] = mapped_column(Boolean)
    changed_at: Mapped[float] = mapped_column(Float)
