"""Defines the SQL table of the gateways that run."""

from sqlalchemy import Float, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class GatewayRow(Base):
    """One gateway process, and the last time that it told the database that it runs.

    `seen_at` is the database's own time, in seconds since the Unix epoch.
    """

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    seen_at: Mapped[float] = mapped_column(Float)
