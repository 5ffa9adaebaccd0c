"""Defines the SQL table of the traces that all gateways share."""

from sqlalchemy import Float, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class RequestTraceRow(Base):
    """The timeline of a traced request that has ended, by the server's id of the request.

    `ended_at` is in unix seconds. `body` is the JSON of a `Timeline`, compressed by zlib.
    """

    __tablename__ = "request_traces"
    __table_args__ = (
        Index("ix_request_traces_tenant_id_ended_at", "tenant_id", "ended_at"),
        Index("ix_request_traces_ended_at", "ended_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    client_request_id: Mapped[str | None] = mapped_column(String(128))
    work_id: Mapped[str | None] = mapped_column(String(64))
    ended_at: Mapped[float] = mapped_column(Float)
    body: Mapped[bytes] = mapped_column(LargeBinary)
