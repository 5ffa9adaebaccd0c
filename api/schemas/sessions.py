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
    """How long the server keeps the session.

    `ttl_s` is the time in seconds since the session's last change or its close.
    """

    ttl_s: Annotated[float | None, Field(ge=0, le=10 * 365 * 86_400)] = None
    """The time in seconds. With null, the server keeps an open session, and applies its own limit to a closed one."""


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
    """How long the server keeps the session after its last change."""

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
    """What the client knows about a tool: how long the tool takes, and when its output is due.

    The server only stores the deadline. It still accepts an output that comes later.
    """

    expected_ms: Annotated[float, Field(ge=0, le=_LONGEST_MS)]
    """How long the tool takes, in milliseconds."""
    deadline_ms: Annotated[float | None, Field(ge=0, le=_LONGEST_MS)] = None
    """When the tool's output is due, in milliseconds after the call."""


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
    """The checkpoint that must be the session's head. If another one is, the server answers with a 409."""
    tool_hints: dict[str, ToolHintBody] | None = None
    """What the client knows about tools, by tool name."""
    tool_choice: ToolChoiceJson = None
    response_format: ResponseFormatJson = None
    sampling: SamplingJson = None

    def hints(self) -> dict[str, ToolHint]:
        """Returns the hints by the names of the tools."""
        given = (self.tool_hints or {}).items()
        return {name: ToolHint(hint.expected_ms, hint.deadline_ms) for name, hint in given}

    def overrides(self) -> TurnOverrides:
        return TurnOverrides(self.tool_choice, self.response_format, self.sampling)


class GivenOutput(NativeBody):
    """The output of one tool call."""

    call_id: str
    output: Any
    """A text. Other JSON becomes JSON text."""


class ToolOutputsBody(TurnOptions):
    """The outputs of tool calls. The session continues when every call has an output."""

    outputs: Annotated[list[GivenOutput], Field(min_length=1, max_length=1024)]
    """The outputs, in any order."""


class ForkBody(NativeBody):
    """Where to fork a session, and how often."""

    at: str | None = None
    """The checkpoint from which the forks continue. By default it is the head."""
    count: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_FORKS})] = 1
    """How many forks to create."""


class RewindBody(NativeBody):
    """Where to rewind a session."""

    to: str
    """The checkpoint that becomes the head."""
