"""Defines the commands for the KV of a session between its turns, and the engine's reply.

Owns the command and the report of where the KV is. engine/kv/session_cache.py carries the commands out.
Invariant: a command never changes an answer, only how fast the next turn starts.
"""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.engine.core.requests import AdapterUse, SessionKey
from graftwork.platform.ids import IsolationDomain


class SessionVerb(StrEnum):
    """What to do with the KV of a session."""

    HOLD = "hold"
    """After a turn: copy its pages to the host, and lease those on the device while tools run."""
    PREFETCH = "prefetch"
    """Before a turn: load its pages onto the device."""
    SUSPEND = "suspend"
    """Before a long pause: copy its pages to the host, and free those on the device."""
    CLOSE = "close"
    """At the session's end: drop every page that no other session uses."""
    READ = "read"
    """Change nothing; only report."""


@dataclass(frozen=True, slots=True)
class ToolWait:
    """A tool that a session waits for."""

    tool: str
    expected_ms: float | None = None
    """The client's estimate of how long the tool takes, in milliseconds."""


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """One verb, for the history of one session."""

    verb: SessionVerb
    session: SessionKey
    domain: IsolationDomain
    adapters: tuple[AdapterUse, ...]
    token_ids: tuple[int, ...]
    """The history, up to the session's head."""
    public_tokens: int = 0
    """See EngineRequest.public_tokens."""
    waits: tuple[ToolWait, ...] = ()
    """With HOLD: the called tools. With PREFETCH: the tools that have answered."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """Where the KV of a session's history is. Each token counts once, on the nearest tier that has its KV."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    missing_tokens: int = 0
    """Tokens that must be computed again. The tokens after the last whole page count too."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    """All copies count: the bytes of a page on two tiers count on both."""
    lease_s: float | None = None
    """Seconds left of the lease on the device pages; None without a lease."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies on all tiers."""
        return self.device_bytes + self.host_bytes + self.disk_bytes
