"""Defines the bodies of the session routes.

Owns the names and types of the fields. The session service checks the values.
"""

from typing import Annotated, Any

from pydantic import Field

from graftwork.api.schemas.base import NativeBody, ToolList
from graftwork.api.schemas.shapes import DocumentedAs, ResponseFormatJson, SamplingJson, SessionInput, ToolChoiceJson
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
    """The time for which the server keeps the session after its last change. `ttl_s` is in seconds."""

    ttl_s: Annotated[float | None, Field(ge=0, le=10 * 365 * 86_400)] = None


class SessionBody(NativeBody):
    """The settings of a new session. A null field counts as missing."""

    model: str
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]] | None, DocumentedAs(ToolList | None)] = None
    tool_choice: ToolChoiceJson = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatJson = None
    sampling: SamplingJson = None
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
    """The changes to a session. Missing and null fields change nothing."""

    model: str | None = None
    metadata: Metadata | None = None


class ToolHintBody(NativeBody):
    """What the client knows about a tool: how long it takes, and when its output is due.

    The server only stores the deadline. It still accepts a late output.
    """

    expected_ms: Annotated[float, Field(ge=0, le=_LONGEST_MS)]
    deadline_ms: Annotated[float | None, Field(ge=0, le=_LONGEST_MS)] = None


class TurnOptions(NativeBody):
    """How the server answers a turn. By default the turn continues when the client leaves."""

    stream: bool | None = None
    cancel_on_disconnect: bool | None = None


class TurnBody(TurnOptions):
    """The input and the settings of a new turn.

    `tool_hints` say how long each tool takes. The server keeps the session's cache on the device for about that long.
    """

    input: SessionInput
    if_head: str | None = None
    tool_hints: dict[str, ToolHintBody] | None = None
    tool_choice: ToolChoiceJson = None
    response_format: ResponseFormatJson = None
    sampling: SamplingJson = None

    def hints(self) -> dict[str, ToolHint]:
        """Return the hints by tool name."""
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
