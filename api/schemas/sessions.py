"""Defines the bodies of the session routes.

Owns the names and types of the fields. The session service checks the values.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from graftwork.api.schemas.base import NativeBody, TierName, ToolList
from graftwork.api.schemas.shapes import DocumentedAs, ResponseFormatJson, SamplingJson, SessionInput, ToolChoiceJson
from graftwork.platform.tenancy.limit_book import MAX_USER_CHARACTERS
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
    """How long the server keeps a session after its last change."""

    ttl_s: Annotated[float | None, Field(ge=0, le=10 * 365 * 86_400)] = None
    """The time in seconds. For an open session it starts at the last change, and for a closed session at the close.

    If it is null, the server keeps an open session without limit, and a closed session as long as the server's own
    limit.
    """


class SessionBody(NativeBody):
    """The body of a request that creates a session. A null field counts as missing."""

    model: str
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]] | None, DocumentedAs(ToolList | None)] = None
    tool_choice: ToolChoiceJson = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatJson = None
    sampling: SamplingJson = None
    metadata: Metadata | None = None
    retention: RetentionBody | None = None
    """How long the server keeps the session."""
    user: Annotated[str | None, Field(min_length=1, max_length=MAX_USER_CHARACTERS)] = None
    """An id of the end user for whom the session is made, in whose limit of sessions it and its forks count.

    Choose one that names nobody, such as a hash.
    """

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
        names_tools = self.tools is not None
        return NewSession(
            self.model, settings, self.metadata or {}, retention_s, names_tools=names_tools, end_user=self.user
        )


class SessionPatch(NativeBody):
    """The body of a request that changes a session. Missing and null fields change nothing."""

    model: str | None = None
    metadata: Metadata | None = None


class ToolHintBody(NativeBody):
    """What the client knows about a tool: how long the tool takes, and when its output is due.

    The server only stores the deadline. It also accepts an output that comes after the deadline.
    """

    expected_ms: Annotated[float, Field(ge=0, le=_LONGEST_MS)]
    """How long the tool takes, in milliseconds."""
    deadline_ms: Annotated[float | None, Field(ge=0, le=_LONGEST_MS)] = None
    """When the tool's output is due, in milliseconds after the call."""


class TurnOptions(NativeBody):
    """The options of a turn: whether to stream it, what happens when the client leaves, and its service tier.

    By default the turn continues when the client leaves.
    """

    stream: bool | None = None
    cancel_on_disconnect: bool | None = None
    service_tier: TierName | None = None
    user: str | None = None
    """An id of the end user for whom the turn runs, whose limits then count. Choose one that names nobody, such as a hash."""

    def overrides(self) -> TurnOverrides:
        """Returns the values that the turn uses instead of the session's settings."""
        return TurnOverrides(service_tier=None if self.service_tier == "auto" else self.service_tier)


class TurnBody(TurnOptions):
    """The input and the settings of a new turn.

    `tool_hints` say how long each tool takes. The server keeps the session's cache on the device for about that long.
    """

    input: SessionInput
    if_head: str | None = None
    """The checkpoint that must be the session's latest one. If it is not, the server answers with a 409."""
    tool_hints: dict[str, ToolHintBody] | None = None
    """What the client knows about tools, by tool name."""
    tool_choice: ToolChoiceJson = None
    response_format: ResponseFormatJson = None
    sampling: SamplingJson = None

    def hints(self) -> dict[str, ToolHint]:
        """Returns the tool hints in the form of the turn runner, by the name of the tool."""
        given = (self.tool_hints or {}).items()
        return {name: ToolHint(hint.expected_ms, hint.deadline_ms) for name, hint in given}

    def overrides(self) -> TurnOverrides:
        own = super().overrides()
        return replace(own, tool_choice=self.tool_choice, response_format=self.response_format, sampling=self.sampling)


class GivenOutput(NativeBody):
    """The output of one tool call."""

    call_id: str
    output: Any
    """The output as text. The server converts other JSON to JSON text."""


class ToolOutputsBody(TurnOptions):
    """Outputs of a session's tool calls. The session continues when every call has an output."""

    outputs: Annotated[list[GivenOutput], Field(min_length=1, max_length=1024)]
    """The outputs, in any order."""


class ForkBody(NativeBody):
    """At which checkpoint to fork a session, and how many forks to create."""

    at: str | None = None
    """The checkpoint from which the forks continue. By default it is the session's latest checkpoint."""
    count: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_FORKS})] = 1
    """How many forks to create."""


class RewindBody(NativeBody):
    """The checkpoint to which a session moves back."""

    to: str
    """The id of the checkpoint. The next turn continues from this checkpoint."""
