"""What a gateway asks the engine to do with the KV of a session between its turns, and the answer."""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.engine.core.requests import AdapterUse, SessionKey
from graftwork.platform.ids import IsolationDomain


class SessionVerb(StrEnum):
    """What is done with the KV of a session between its turns."""

    HOLD = "hold"
    """A turn has ended: copy its pages down, and lease those on the device while its tools run."""
    PREFETCH = "prefetch"
    """The session will go on soon: bring its pages to the device."""
    SUSPEND = "suspend"
    """It will not go on soon: copy its pages down and give up those on the device."""
    CLOSE = "close"
    """It is over: give up every page that no other session reaches."""
    READ = "read"
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class ToolWait:
    """A tool that a session waits for."""

    tool: str
    expected_ms: float | None = None
    """The client's own guess."""


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """One verb on the KV of one session's history."""

    verb: SessionVerb
    session: SessionKey
    domain: IsolationDomain
    adapters: tuple[AdapterUse, ...]
    token_ids: tuple[int, ...]
    """The history up to the session's head."""
    public_tokens: int = 0
    waits: tuple[ToolWait, ...] = ()
    """With HOLD the tools that were called, with PREFETCH those that have answered."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """Where the KV of a session's history is; each token is counted on the nearest tier that has it."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    missing_tokens: int = 0
    """Tokens of whole pages and of the tail that would be recomputed."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    """Bytes of copies, wherever they are: a page on two tiers counts on both."""
    lease_s: float | None = None
    """Seconds for which the device pages are leased from now; None without a lease."""

    @property
    def num_bytes(self) -> int:
        """Of all copies on all tiers."""
        return self.device_bytes + self.host_bytes + self.disk_bytes
