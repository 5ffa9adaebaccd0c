"""Defines the SQL tables of files, batches and their answers. All times are seconds since the Unix epoch."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.contents.columns import CONTENT
from graftwork.platform.database import Base


class FileRow(Base):
    """A file of a tenant. Its content is in the folder of files; the row is there before the content and after it."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(255))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    is_ready: Mapped[bool] = mapped_column(Boolean)
    """Whether the content is complete. A file that is not ready is being written, or being deleted."""
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float, index=True)


class BatchRow(Base):
    """A batch of requests, how far it is, and which gateway runs it."""

    __tablename__ = "batches"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(64))
    """The API key that made the batch, for which its requests run."""
    form: Mapped[str] = mapped_column(String(16))
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64), index=True)
    client_metadata: Mapped[dict[str, str] | None] = mapped_column("metadata", JSON(none_as_null=True), info=CONTENT)
    status: Mapped[str] = mapped_column(String(16))
    ending: Mapped[str | None] = mapped_column(String(16))
    """The status with which the batch will end. From then on no line of it is answered."""
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)
    in_progress_at: Mapped[float | None] = mapped_column(Float)
    finalizing_at: Mapped[float | None] = mapped_column(Float)
    cancelling_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float, index=True)
    total: Mapped[int] = mapped_column(Integer, server_default="0")
    succeeded: Mapped[int] = mapped_column(Integer, server_default="0")
    errored: Mapped[int] = mapped_column(Integer, server_default="0")
    input_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    output_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    model: Mapped[str | None] = mapped_column(String(400))
    """The model that the first line names."""
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))
    output_lives_s: Mapped[float | None] = mapped_column(Float)
    """The seconds after which the output files expire; NULL means the server's own time."""
    gateway: Mapped[str | None] = mapped_column(String(128))
    """The gateway that runs the batch, for as long as that gateway is alive."""
    epoch: Mapped[int] = mapped_column(Integer, server_default="0")
    """How often a gateway has claimed the batch. Only the last claim may change it."""


class BatchAnswerRow(Base):
    """The answer to one line of a batch that runs. The end of the batch moves all answers to files."""

    __tablename__ = "batch_answers"

    batch_id: Mapped[str] = mapped_column(String(64), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True)
    line: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """The number of the line in the input file, from 1."""
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    is_error: Mapped[bool] = mapped_column(Boolean)
    body: Mapped[bytes] = mapped_column(LargeBinary, info=CONTENT)
    """The line of the output or error file, without its end."""
