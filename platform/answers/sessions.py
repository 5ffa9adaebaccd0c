"""The answers of `/v1/sessions`: sessions, turns, items and caches."""

from typing import (
    Any,
    Literal,  # pydantic reads this one only, before Python 3.12
)

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.errors import ErrorFields
from graftwork.platform.answers.usage import CacheReport, Usage

ItemType = Literal["message", "function_call", "function_call_output"]


class PinnedModel(Answer):
    """The adapter version that a session was created with. The base model has no version and no digest."""

    name: str
    version: int | None
    digest: str | None


class Retention(Answer):
    """How long a session stays readable, in seconds. None is the server's own time."""

    ttl_s: float | None


class SessionState(Answer):
    """A session as the server last described it."""

    id: str
    object: Literal["session"] = "session"
    status: str
    """`idle`, `running`, `awaiting_tool`, `suspended` or `closed`."""
    model: PinnedModel
    head: str | None
    """The checkpoint that the next turn continues."""
    created_at: float
    updated_at: float
    closed_at: float | None
    forked_from: str | None
    running_turn: str | None
    awaiting: tuple[str, ...]
    """The ids of the calls that need outputs before the session continues."""
    last_seq: int
    """The number of its newest event."""
    instructions: str | None
    tools: tuple[dict[str, Any], ...]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any] | None
    sampling: dict[str, Any]
    metadata: dict[str, str]
    retention: Retention


class GivenUpKv(Answer):
    """Cached history that another adapter cannot use. `bytes` is None while no engine answers."""

    tokens: int
    bytes: int | None


class ChangedSession(SessionState):
    """A session after a change, and the cache that the change gave up."""

    kv_given_up: GivenUpKv


class ContentPart(Answer):
    """One piece of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: tuple[dict[str, Any], ...] | None = absent()


class Item(Answer):
    """One entry of a history. Which fields are present depends on `type`."""

    id: str
    type: ItemType
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["user", "system", "developer", "assistant"] | None = absent()
    content: tuple[ContentPart, ...] | None = absent()
    call_id: str | None = absent()
    name: str | None = absent()
    arguments: str | None = absent()
    """JSON text."""
    output: str | None = absent()

    @property
    def text(self) -> str:
        """A message's text, whether it came as a string or as parts. Other types have none."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or () if isinstance(part, ContentPart))


class PendingCall(Answer):
    """A tool call that waits for its output. `arguments` is JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


class AwaitedCall(PendingCall):
    """A call that waits, and when its output is expected at the latest, in unix seconds."""

    deadline_at: float | None


class StoredOutput(Answer):
    """The output that the server has for one call."""

    call_id: str
    output: str


class GivenOutputs(Answer):
    """The calls that a history ends in: the outputs that the server has, and the calls that still wait."""

    object: Literal["tool_outputs"] = "tool_outputs"
    session_id: str
    status: str
    """The session's."""
    outputs: tuple[StoredOutput, ...]
    tool_calls: tuple[AwaitedCall, ...]


class Turn(Answer):
    """The result of one turn."""

    id: str
    object: Literal["turn"] = "turn"
    session_id: str
    status: str
    """`running`, `completed`, `awaiting_tool`, `failed` or `cancelled`."""
    output: tuple[Item, ...]
    tool_calls: tuple[PendingCall, ...]
    checkpoint_id: str | None
    """The session's head after the turn."""
    finish_reason: str | None
    usage: Usage | None
    cache: CacheReport | None
    error: ErrorFields | None
    made_with: dict[str, Any] | None
    """The digests and the sampling that the turn was made with."""
    created_at: float
    finished_at: float | None

    @property
    def text(self) -> str:
        """The text of the turn's messages."""
        return "".join(item.text for item in self.output if item.type == "message")


class Lease(Answer):
    """Until when the device keeps a session's pages in preference to others, in unix seconds."""

    tier: str
    seconds: float
    until: float


class TierUse(Answer):
    """What one tier holds. `bytes` is None while no engine answers."""

    tokens: int
    bytes: int | None


class SessionCache(Answer):
    """What the server holds of a session, by tier: `device`, `host` and `disk`."""

    object: Literal["session.cache"] = "session.cache"
    session_id: str
    tiers: dict[str, TierUse]
    missing_tokens: int | None
    """Tokens of the history that no tier holds."""
    recomputed_tokens: int
    """Tokens that the latest turn computed again."""
    lease: Lease | None
    last_miss_reason: str | None


class Prefetch(Answer):
    """What a prefetch found: tokens that are on the device, or are being loaded."""

    object: Literal["session.prefetch"] = "session.prefetch"
    session_id: str
    history_tokens: int
    prefetched_tokens: int
    missing_tokens: int
