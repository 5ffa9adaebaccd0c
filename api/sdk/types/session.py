"""The answers of `/v1/sessions`: sessions, turns, items, caches."""

from dataclasses import dataclass
from typing import Any

from graftwork.api.sdk.types.base import Answer, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedModel(Answer):
    """The adapter version that a session was created with; no version or digest for the base model."""

    name: str = ""
    version: int | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState(Answer):
    """A session as the server last described it. `status`: idle, running, awaiting_tool, suspended, closed."""

    id: str = ""
    status: str = ""
    model: PinnedModel = PinnedModel()
    head: str | None = None
    created_at: float = 0.0
    forked_from: str | None = None
    awaiting: tuple[str, ...] = ()
    """The call ids that need outputs before it goes on."""
    last_seq: int | None = None
    """The number of its newest event."""
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item(Answer):
    """One entry of a transcript: `message`, `function_call` or `function_call_output`."""

    id: str = ""
    type: str = ""
    role: str | None = None
    content: Any = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    @property
    def text(self) -> str:
        """A message's text, whether it came as a string or as parts; empty for the other types."""
        if isinstance(self.content, str):
            return self.content
        parts = self.content if isinstance(self.content, list) else []
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall(Answer):
    """A tool call that waits for its output; `arguments` is JSON text, as the model wrote it."""

    call_id: str = ""
    name: str = ""
    arguments: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOutput(Answer):
    """What a call was answered with."""

    call_id: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOutputs(Answer):
    """Of the calls that a history ends in: the outputs that the server has, and the calls that wait for theirs."""

    status: str = ""
    """The session's."""
    outputs: tuple[StoredOutput, ...] = ()
    tool_calls: tuple[PendingCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport(Answer):
    """Where a turn's prompt came from, and why not all of it from the cache."""

    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    miss_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Answer):
    """What one turn came to. `status`: completed, awaiting_tool, failed, cancelled."""

    id: str = ""
    status: str = ""
    output: tuple[Item, ...] = ()
    tool_calls: tuple[PendingCall, ...] = ()
    checkpoint_id: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    cache: CacheReport | None = None
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text of the turn's messages."""
        return "".join(item.text for item in self.output if item.type == "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse(Answer):
    """What one tier holds; None where the server does not tell."""

    tokens: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCache(Answer):
    """What the server holds of a session, by tier: device, host, disk."""

    tiers: dict[str, TierUse] | None = None
    recomputed_tokens: int = 0
    lease: Any = None
    last_miss_reason: str | None = None
