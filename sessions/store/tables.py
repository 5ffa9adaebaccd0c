"""Defines the tables of sessions: sessions, turns, checkpoints, items, tool calls, events and responses.

Owns the columns. Never contains rules about sessions: they are in `sessions/core/session.py`.
Invariant: rows of checkpoints, items and hidden items are added and deleted, but never changed. Checkpoints form a tree.
Columns of content are marked with CONTENT, and are written and read by way of `platform/contents/rows.py`.
Text from clients is stored in JSON columns, because PostgreSQL's text type cannot hold every character that JSON can.
Ids of tables in other packages, such as tenant ids, are plain strings here, without a foreign key.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, ForeignKey, Index, LargeBinary, String, column, true
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.contents.columns import CONTENT
from graftwork.platform.database import Base

_Id = String(64)
_Name = String(32)
_Json = JSON(none_as_null=True)
_HAS_EVENTS = column("has_events", Boolean).is_(true())
"""The rows of a partial index: databases use it only for statements with exactly this condition."""


def _of_beginners(name: str) -> Index:
    """Returns the index by which the open sessions are found that a key or an end user has begun."""
    is_known = column(name).is_not(None)
    return Index(None, name, "status", postgresql_where=is_known, sqlite_where=is_known)


class SessionRow(Base):
    __tablename__ = "sessions"
    __table_args__ = (
        Index(None, "tenant_id", "kind", "id"),
        Index(None, "kind", "status"),
        Index(None, "status", "lease_expires_at"),
        Index(None, "ends_at"),
        _of_beginners("key_id"),
        _of_beginners("end_user_id"),
    )

    id: Mapped[str] = mapped_column(_Id, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(_Id)
    kind: Mapped[str] = mapped_column(_Name)
    status: Mapped[str] = mapped_column(_Name)
    model: Mapped[dict[str, Any]] = mapped_column(_Json)
    settings: Mapped[dict[str, Any]] = mapped_column(_Json, info=CONTENT)
    labels: Mapped[dict[str, str]] = mapped_column(_Json, info=CONTENT)
    """The session's metadata. SQLAlchemy reserves the name `metadata`."""
    retention_s: Mapped[float | None]
    ends_at: Mapped[float | None]
    """The value of `AgentSession.ends_at`. It has an index, so that the search for sessions to delete is fast."""
    head_id: Mapped[str | None] = mapped_column(_Id)
    origin_id: Mapped[str | None] = mapped_column(_Id)
    forked_from: Mapped[str | None] = mapped_column(_Id)
    key_id: Mapped[str | None] = mapped_column(_Id)
    """The API key in whose limit the session counts; NULL for sessions that are older than this column."""
    end_user_id: Mapped[str | None] = mapped_column(_Id)
    """The end user for whom the session was begun, as a digest; NULL for none."""
    epoch: Mapped[int] = mapped_column(BigInteger)
    running_turn_id: Mapped[str | None] = mapped_column(_Id)
    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_expires_at: Mapped[float | None]
    cancel_requested: Mapped[bool]
    last_seq: Mapped[int] = mapped_column(BigInteger)
    last_cache: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    created_at: Mapped[float]
    updated_at: Mapped[float]
    closed_at: Mapped[float | None]


class TurnRow(Base):
    __tablename__ = "turns"
    __table_args__ = (
        Index(None, "session_id", "id"),
        # Small, because the events of old turns are deleted.
        Index(None, "finished_at", "id", postgresql_where=_HAS_EVENTS, sqlite_where=_HAS_EVENTS),
    )

    id: Mapped[str] = mapped_column(_Id, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(_Id)
    session_id: Mapped[str] = mapped_column(_Id, ForeignKey("sessions.id"))
    status: Mapped[str] = mapped_column(_Name)
    parent_id: Mapped[str | None] = mapped_column(_Id)
    checkpoint_id: Mapped[str | None] = mapped_column(_Id)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    input: Mapped[list[dict[str, Any]]] = mapped_column(_Json, info=CONTENT)
    finish_reason: Mapped[str | None] = mapped_column(_Name)
    usage: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    cache: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    made_with: Mapped[dict[str, Any] | None] = mapped_column(_Json, info=CONTENT)
    key_id: Mapped[str | None] = mapped_column(_Id)
    """The API key that started the turn, for the usage row if the turn's process dies."""
    error: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    has_events: Mapped[bool] = mapped_column(server_default=true())
    """Whether the turn may have rows in `events`. It has none any more if it ended long ago."""


class CheckpointRow(Base):
    __tablename__ = "checkpoints"

    id: Mapped[str] = mapped_column(_Id, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(_Id)
    session_id: Mapped[str] = mapped_column(_Id, ForeignKey("sessions.id"), index=True)
    parent_id: Mapped[str | None] = mapped_column(_Id, ForeignKey("checkpoints.id"), index=True)
    turn_id: Mapped[str] = mapped_column(_Id, ForeignKey("turns.id"), index=True)
    depth: Mapped[int]
    num_items: Mapped[int]
    num_answer_items: Mapped[int]
    num_tokens: Mapped[int]
    token_ids: Mapped[bytes] = mapped_column(LargeBinary, info=CONTENT)
    """The token ids that this checkpoint's turn added, first those of the prompt, as little-endian int32."""
    closed: Mapped[bool]
    awaits_tools: Mapped[bool]
    opening: Mapped[str | None] = mapped_column(String(64))
    """The digest of the instructions and tools at the start of the prompt."""
    created_at: Mapped[float]


class ItemRow(Base):
    __tablename__ = "items"
    __table_args__ = (Index(None, "checkpoint_id", "position", unique=True),)

    id: Mapped[str] = mapped_column(_Id, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(_Id)
    checkpoint_id: Mapped[str] = mapped_column(_Id, ForeignKey("checkpoints.id"))
    position: Mapped[int]
    """The index of the item in the history, from 0."""
    type: Mapped[str] = mapped_column(_Name)
    body: Mapped[dict[str, Any]] = mapped_column(_Json, info=CONTENT)


class HiddenItemRow(Base):
    """Hides an item from every history that has this checkpoint: from its prompts and from its list of items."""

    __tablename__ = "hidden_items"

    checkpoint_id: Mapped[str] = mapped_column(_Id, ForeignKey("checkpoints.id"), primary_key=True)
    item_id: Mapped[str] = mapped_column(_Id, primary_key=True)
    """The id of an item of an earlier checkpoint. There is no foreign key, because the item may be erased first."""
    tenant_id: Mapped[str] = mapped_column(_Id)


class ToolCallRow(Base):
    """A tool call at the end of a checkpoint, with the output that a client sent to one session.

    If several sessions share a checkpoint, each session has its own row for the call.
    """

    __tablename__ = "tool_calls"
    __table_args__ = (Index(None, "session_id", "call_id"), Index(None, "checkpoint_id"))

    session_id: Mapped[str] = mapped_column(_Id, ForeignKey("sessions.id"), primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(_Id, ForeignKey("checkpoints.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(_Id)
    call_id: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(_Json, info=CONTENT)
    arguments: Mapped[str] = mapped_column(_Json, info=CONTENT)
    output: Mapped[str | None] = mapped_column(_Json, info=CONTENT)
    answered_at: Mapped[float | None]
    deadline_at: Mapped[float | None]
    turn_id: Mapped[str | None] = mapped_column(_Id)
    """The latest turn whose prompt contains the output."""


class EventRow(Base):
    __tablename__ = "events"

    session_id: Mapped[str] = mapped_column(_Id, ForeignKey("sessions.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(_Id)
    turn_id: Mapped[str] = mapped_column(_Id)
    type: Mapped[str] = mapped_column(String(40))
    fields: Mapped[dict[str, Any]] = mapped_column(_Json, info=CONTENT)
    answer_tokens: Mapped[int | None] = mapped_column(BigInteger)
    """How many tokens of the turn's answer were generated up to this event."""
    at: Mapped[float]


class ResponseRow(Base):
    """A response of the Responses API: the session that holds it, and the client's request.

    The id of a response is the id of its turn with another prefix.
    """

    __tablename__ = "responses"
    __table_args__ = (Index(None, "session_id"), Index(None, "created_at"))

    id: Mapped[str] = mapped_column(_Id, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(_Id)
    session_id: Mapped[str] = mapped_column(_Id, ForeignKey("sessions.id"))
    request: Mapped[dict[str, Any]] = mapped_column(_Json, info=CONTENT)
    created_at: Mapped[float]
