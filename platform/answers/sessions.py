"""Defines the answers of `/v1/sessions`: sessions, turns, items and caches."""

from typing import (
    Any,
    Literal,  # before Python 3.12, pydantic needs the class of typing_extensions
)

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.usage import CacheReport, Usage

ItemType = Literal["message", "function_call", "function_call_output"]


class PinnedModel(Answer):
    """The adapter version that a session uses. For the base model, `version` and `digest` are null."""

    name: str
    version: int | None
    digest: str | None


class Retention(Answer):
    """The time for which the server keeps a session after its last change, in seconds.

    With null, the server keeps an open session, and applies its own limit to a closed one.
    """

    ttl_s: float | None


class SessionState(Answer):
    """The state of a session when the server sent it."""

    id: str
    object: Literal["session"] = "session"
    status: str
    """The session's status: `idle`, `running`, `awaiting_tool`, `suspended` or `closed`."""
    model: PinnedModel
    head: str | None
    """The id of the checkpoint, a point in the history after a turn, from which the next turn continues."""
    created_at: float
    updated_at: float
    closed_at: float | None
    forked_from: str | None
    running_turn: str | None
    awaiting: tuple[str, ...]
    """The ids of the tool calls that still need outputs. The session continues when every call has an output."""
    last_seq: int
    """The number of the session's newest event."""
    instructions: str | None
    tools: tuple[dict[str, Any], ...]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any] | None
    sampling: dict[str, Any]
    metadata: dict[str, str]
    retention: Retention


class GivenUpKv(Answer):
    """The size of the cache that a session dropped, because a new adapter cannot use it.

    `bytes` is null if no engine answers.
    """

    tokens: int
    bytes: int | None


class ChangedSession(SessionState):
    """A session after a change. `kv_given_up` is the size of the cache that the change dropped."""

    kv_given_up: GivenUpKv


class ContentPart(Answer):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: tuple[dict[str, Any], ...] | None = absent()


class Item(Answer):
    """One entry of a history, such as a message or a tool call. `type` decides which fields the entry has."""

    id: str
    type: ItemType
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["user", "system", "developer", "assistant"] | None = absent()
    content: tuple[ContentPart, ...] | None = absent()
    call_id: str | None = absent()
    name: str | None = absent()
    arguments: str | None = absent()
    """The call's arguments as JSON text."""
    output: str | None = absent()

    @property
    def text(self) -> str:
        """The text of a message. `content` may be a string or parts. Items of other types have no text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or () if isinstance(part, ContentPart))


class PendingCall(Answer):
    """A tool call that needs an output. `arguments` is the JSON text that the model wrote."""

    call_id: str
    name: str
    arguments: str


class AwaitedCall(PendingCall):
    """A tool call that needs an output. `deadline_at` is the time in unix seconds when the output is due."""

    deadline_at: float | None


class StoredOutput(Answer):
    """The output that the server has stored for one tool call."""

    call_id: str
    output: str


class GivenOutputs(Answer):
    """The state of the tool calls at the end of a history.

    `outputs` are the outputs that the server has. `tool_calls` are the calls that still need an output.
    """

    object: Literal["tool_outputs"] = "tool_outputs"
    session_id: str
    status: str
    """The status of the session."""
    outputs: tuple[StoredOutput, ...]
    tool_calls: tuple[AwaitedCall, ...]


class Turn(Answer):
    """The result of one turn."""

    id: str
    object: Literal["turn"] = "turn"
    session_id: str
    status: str
    """The turn's status: `running`, `completed`, `awaiting_tool`, `failed` or `cancelled`."""
    output: tuple[Item, ...]
    tool_calls: tuple[PendingCall, ...]
    checkpoint_id: str | None
    """The id of the checkpoint after this turn. The session's next turn continues from this checkpoint."""
    finish_reason: str | None
    usage: Usage | None
    cache: CacheReport | None
    error: ErrorFields | None
    made_with: dict[str, Any] | None
    """What produced the turn: digests that identify the inputs, such as the weights, and the sampling parameters."""
    created_at: float
    finished_at: float | None

    @property
    def text(self) -> str:
        """The text of all messages of the turn."""
        return "".join(item.text for item in self.output if item.type == "message")


class Lease(Answer):
    """A lease: until the time `until`, in unix seconds, the engine prefers to keep the session's cached pages."""

    tier: str
    seconds: float
    until: float


class TierUse(Answer):
    """How much of a session's history is in one tier of the cache: device memory, host memory or disk.

    `bytes` is null if no engine answers.
    """

    tokens: int
    bytes: int | None


class SessionCache(Answer):
    """The cached part of a session's history. The keys of `tiers` are `device`, `host` and `disk`."""

    object: Literal["session.cache"] = "session.cache"
    session_id: str
    tiers: dict[str, TierUse]
    missing_tokens: int | None
    """The number of tokens of the history that are in no tier of the cache."""
    recomputed_tokens: int
    """The number of prompt tokens that the latest turn had to compute."""
    lease: Lease | None
    last_miss_reason: str | None


class Prefetch(Answer):
    """The result of loading a session's cache to the device before its next turn.

    `prefetched_tokens` counts the tokens that are on the device, or that the engine is loading.
    """

    object: Literal["session.prefetch"] = "session.prefetch"
    session_id: str
    history_tokens: int
    prefetched_tokens: int
    missing_tokens: int
