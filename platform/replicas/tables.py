"""Defines the SQL tables of the engines (replicas) that run, and of those that are asked for."""

from sqlalchemy import BigInteger, Float, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class ReplicaRow(Base):
    """One engine: where it answers, what it serves, and the last time that it was seen.

    `epoch` counts the starts of engines under this id, and `generation` the upgrades of what engines serve under this
    model name. `seen_at` is the database's own time, in seconds since the Unix epoch.
    """

    __tablename__ = "replicas"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger)
    address: Mapped[str] = mapped_column(String(512))
    model: Mapped[str] = mapped_column(String(256))
    fingerprint: Mapped[str] = mapped_column(String(128))
    version: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    seen_at: Mapped[float] = mapped_column(Float)
    generation: Mapped[int] = mapped_column(BigInteger, server_default="1")


class EngineDemandRow(Base):
    """Whether engines of a model are started when gateways ask for them, and when one did last.

    Both times are the database's own, in seconds since the Unix epoch; 0 means never.
    """

    __tablename__ = "engine_demands"

    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    offered_at: Mapped[float] = mapped_column(Float)
    asked_at: Mapped[float] = mapped_column(Float)
