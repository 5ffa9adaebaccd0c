"""Declares which rows of sessions are in an export: all of them, with the exact tokens."""

import struct

from graftwork.platform.exports.sections import Section
from graftwork.sessions.store.tables import (
    CheckpointRow,
    EventRow,
    HiddenItemRow,
    ItemRow,
    ResponseRow,
    SessionRow,
    ToolCallRow,
    TurnRow,
)


def _token_ids(stored: bytes) -> list[int]:
    """Reads token ids that are stored as little-endian int32."""
    return list(struct.unpack(f"<{len(stored) // 4}i", stored))


_SESSIONS = Section(
    "sessions/sessions",
    SessionRow,
    withheld={"lease_owner": "names a process of the server, and nothing of the tenant"},
)
_CHECKPOINTS = Section(
    "sessions/checkpoints",
    CheckpointRow,
    parent=_SESSIONS,
    parent_column="session_id",
    decoders={"token_ids": _token_ids},
)
SESSION_SECTIONS = (
    _SESSIONS,
    Section("sessions/turns", TurnRow, parent=_SESSIONS, parent_column="session_id"),
    _CHECKPOINTS,
    Section("sessions/items", ItemRow, parent=_CHECKPOINTS, parent_column="checkpoint_id"),
    Section("sessions/hidden_items", HiddenItemRow, parent=_CHECKPOINTS, parent_column="checkpoint_id"),
    Section("sessions/tool_calls", ToolCallRow, parent=_SESSIONS, parent_column="session_id"),
    Section("sessions/events", EventRow, parent=_SESSIONS, parent_column="session_id"),
    Section("sessions/responses", ResponseRow, parent=_SESSIONS, parent_column="session_id"),
)
