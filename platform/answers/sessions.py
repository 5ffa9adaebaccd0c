"""Defines the JSON answers of `/v1/sessions`: sessions, turns, the items of a history, and the state of a session's
cache.
"""

from typing import (
    Any,
    Literal,  # before Python 3.12, pydantic needs the class of typing_extensions
)

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.usage import CacheReport, TurnUsage, UsageTotals

ItemType = Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"]


class PinnedModel(Answer):
    """The model that a session uses. For an adapter, it is one fixed version.

    For the base model, `version` and `digest` are null.
    """

    name: str
    version: int | None
    digest: str | None


class Retention(Answer):
    """How long the server keeps a session. `ttl_s` is the time in seconds after the session's last change.

    If `ttl_s` is null, the server keeps an open session without a limit, and a closed session for the server's default
    time.
    """

    ttl_s: float | None


class SessionState(Answer):
    """A session, as it was at the moment when the server sent the answer."""

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
    usage: UsageTotals | None = absent()
    """What the session's turns have used, and what they cost. Only where a session is read by its id or in a list."""


class GivenUpKv(Answer):
    """The size of the KV cache that a session lost, because its new adapter cannot use the cache.

    `tokens` is the number of cached tokens, and `bytes` their size. `bytes` is null if no engine answers.
    """

    tokens: int
    bytes: int | None


class ChangedSession(SessionState):
    """A session after a change of its settings. `kv_given_up` is the size of the KV cache that the session lost by the
    change.
    """

    kv_given_up: GivenUpKv


class ContentPart(Answer):
    """One part of a message in a history. It is always text."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: tuple[dict[str, Any], ...] | None = absent()
    logprobs: tuple[dict[str, Any], ...] | None = absent()
    """The log-probabilities of the text's tokens, if the request asked for them."""


class Item(Answer):
    """One entry of a session's history: a message, a tool call, or the output of a tool call.

    `type` decides which other fields the entry has.
    """

    id: str
    type: ItemType
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["user", "system", "developer", "assistant"] | None = absent()
    content: tuple[ContentPart, ...] | None = absent()
    call_id: str | None = absent()
    name: str | None = absent()
    arguments: str | None = absent()
    """The call's arguments as JSON text."""
    input: str | None = absent()
    """The text that a call gives to a custom tool."""
    namespace: str | None = absent()
    """The namespace of the called tool."""
    output: str | None = absent()

    @property
    def text(self) -> str:
        """The text of a message. It is empty if the item is not a message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or () if isinstance(part, ContentPart))


class PendingCall(Answer):
    """A tool call whose output the server does not have yet. `arguments` is the JSON text that the model wrote."""

    call_id: str
    name: str
    arguments: str


class AwaitedCall(PendingCall):
    """A tool call whose output the server does not have yet.

    `deadline_at` is the time until which the client expects to send the output, in unix seconds, or null if the client
    gave no time. The server accepts a later output too.
    """

    deadline_at: float | None


class StoredOutput(Answer):
    """One tool call's output, as the client sent it and the server stored it."""

    call_id: str
    output: str


class GivenOutputs(Answer):
    """The tool calls at the end of a session's history, after a client has sent outputs for them.

    `outputs` has the outputs that are stored. `tool_calls` has the calls that still need an output.
    """

    object: Literal["tool_outputs"] = "tool_outputs"
    session_id: str
    status: str
    """The status of the session."""
    outputs: tuple[StoredOutput, ...]
    tool_calls: tuple[AwaitedCall, ...]


class Turn(Answer):
    """One turn of a session: its status, its output and its token counts."""

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
    usage: TurnUsage | None
    """The tokens, memory and cost of the turn. Null for a turn that failed by the server's fault: it costs nothing."""
    cache: CacheReport | None
    error: ErrorFields | None
    made_with: dict[str, Any] | None
    """What produced the turn: digests that identify the inputs, such as the weights, and the sampling parameters."""
    service_tier: str | None = None
    """The tier that served the turn. It may be lower than the tier that the request asked for."""
    created_at: float
    finished_at: float | None

    @property
    def text(self) -> str:
        """The text of all messages in the turn's output, joined."""
        return "".join(item.text for item in self.output if item.type == "message")


class Lease(Answer):
    """A lease on a session's KV cache: the engine tries to keep the cache in device memory until `until`, in unix
    seconds.

    `seconds` is the time that was left when the server sent the answer.
    """

    tier: str
    seconds: float
    until: float


class TierUse(Answer):
    """The part of a session's history that is cached in one place: device memory, host memory or disk.

    `tokens` is the number of tokens, and `bytes` the size of their KV. `bytes` is null if no engine answers.
    """

    tokens: int
    bytes: int | None


class SessionCache(Answer):
    """The part of a session's history whose KV is cached, by place. The keys of `tiers` are `device`, `host` and
    `disk`.
    """

    object: Literal["session.cache"] = "session.cache"
    session_id: str
    tiers: dict[str, TierUse]
    missing_tokens: int | None
    """The number of tokens of the history whose KV is cached nowhere."""
    recomputed_tokens: int
    """The number of prompt tokens that the latest turn had to compute."""
    lease: Lease | None
    last_miss_reason: str | None


class Prefetch(Answer):
    """The result of a prefetch, which loads a session's cached KV into device memory before the next turn.

    `prefetched_tokens` counts the tokens that are in device memory, or that the engine is loading there now.
    """

    object: Literal["session.prefetch"] = "session.prefetch"
    session_id: str
    history_tokens: int
    prefetched_tokens: int
    missing_tokens: int
