"""The bodies of the session routes.

Owns the fields' names and types. The session service checks their values.
"""

from typing import Annotated, Any

from pydantic import Field

from graftwork.api.schemas.base import NativeBody
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.service import MAX_FORKS, NewSession
from graftwork.sessions.turns.runner import ToolHint
from graftwork.sessions.turns.settings import TurnOverrides

MAX_METADATA = 16
_LONGEST_MS = 7 * 86_400_000

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]


class RetentionBody(NativeBody):
    """How long the session stays readable."""

    ttl_s: Annotated[float | None, Field(ge=0, le=10 * 365 * 86_400)] = None


class SessionBody(NativeBody):
    """A new session. Null means absent."""

    model: str
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    sampling: dict[str, Any] | None = None
    metadata: Metadata | None = None
    retention: RetentionBody | None = None

    def new_session(self) -> NewSession:
        settings = SessionSettings(
            instructions=self.instructions,
            tools=tuple(self.tools or ()),
            tool_choice="auto" if self.tool_choice is None else self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self.response_format,
            sampling=self.sampling or {},
        )
        retention_s = None if self.retention is None else self.retention.ttl_s
        return NewSession(self.model, settings, self.metadata or {}, retention_s)


class SessionPatch(NativeBody):
    """The changes to a session. Absent and null fields stay as they are."""

    model: str | None = None
    metadata: Metadata | None = None


class ToolHintBody(NativeBody):
    """What a caller knows of a tool. A deadline is only stored; a later output is still accepted."""

    expected_ms: Annotated[float, Field(ge=0, le=_LONGEST_MS)]
    deadline_ms: Annotated[float | None, Field(ge=0, le=_LONGEST_MS)] = None


class TurnOptions(NativeBody):
    """How a turn is answered. By default it continues when the client leaves."""

    stream: bool | None = None
    cancel_on_disconnect: bool | None = None


class TurnBody(TurnOptions):
    """A user's turn. `tool_hints` say how long each tool takes, and so how long to keep the session's cache on the device."""

    input: str | list[Any]
    if_head: str | None = None
    tool_hints: dict[str, ToolHintBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    sampling: dict[str, Any] | None = None

    def hints(self) -> dict[str, ToolHint]:
        """The hints by tool name."""
        given = (self.tool_hints or {}).items()
        return {name: ToolHint(hint.expected_ms, hint.deadline_ms) for name, hint in given}

    def overrides(self) -> TurnOverrides:
        return TurnOverrides(self.tool_choice, self.response_format, self.sampling)


class GivenOutput(NativeBody):
    call_id: str
    output: Any


class ToolOutputsBody(TurnOptions):
    outputs: Annotated[list[GivenOutput], Field(min_length=1, max_length=1024)]


class ForkBody(NativeBody):
    at: str | None = None
    count: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_FORKS})] = 1


class RewindBody(NativeBody):
    to: str
