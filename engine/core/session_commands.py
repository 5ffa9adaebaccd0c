"""Defines the commands for the cached KV of a session between its turns, and the engine's reply.

engine/kv/session_cache.py runs the commands. Invariant: a command never changes an answer, only how fast the next turn
starts.
"""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.engine.core.requests import AdapterUse, KvFileKey, SessionKey
from graftwork.engine.core.sampling import RollingWindow
from graftwork.platform.ids import IsolationDomain


class SessionVerb(StrEnum):
    """A kind of command for the KV of a session."""

    HOLD = "hold"
    """After a turn: copy the session's pages to the host, and lease its device pages while tools run."""
    PREFETCH = "prefetch"
    """Before a turn: load the session's pages onto the device."""
    SUSPEND = "suspend"
    """Before a long pause: copy the session's pages to the host, and free its device pages."""
    CLOSE = "close"
    """At the session's end: drop every page that no other session uses."""
    CHANGE = "change"
    """After a change of the session's adapter: drop every page that no other session uses. The session goes on, and its
    next turn reports that the adapter has changed.
    """
    READ = "read"
    """Change nothing; only report."""


@dataclass(frozen=True, slots=True)
class ToolWait:
    """A tool whose answer a session waits for."""

    tool: str
    expected_ms: float | None = None
    """The client's estimate of how long the tool takes, in milliseconds."""


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """A command for the cached KV of one session."""

    verb: SessionVerb
    session: SessionKey
    domain: IsolationDomain
    adapters: tuple[AdapterUse, ...]
    token_ids: tuple[int, ...]
    """The history: all tokens of the session so far."""
    public_tokens: int = 0
    """See EngineRequest.public_tokens."""
    waits: tuple[ToolWait, ...] = ()
    """The tools of the command. With HOLD, these are the called tools. With PREFETCH, these are the tools that have
    answered.
    """
    kv_key: KvFileKey | None = None
    """See EngineRequest.kv_key."""
    window: RollingWindow | None = None
    """The rolling window of the session's turns: the KV is that of such turns."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """For how many tokens of a session's history the KV is cached, by tier (device, host, disk).

    If the KV of a token is on several tiers, the token counts once, on the first of these tiers. The sizes in bytes
    count the copies on all tiers.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    missing_tokens: int = 0
    """Tokens that must be computed again, including the tokens after the last whole page."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    """Bytes of the session's KV on disk. A page that is also on another tier counts on both."""
    lease_s: float | None = None
    """Seconds until the lease on the device pages ends; None without a lease."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the session's KV on all tiers together. A page that is on two tiers counts twice."""
        return self.device_bytes + self.host_bytes + self.disk_bytes
