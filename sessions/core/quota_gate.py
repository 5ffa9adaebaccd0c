"""The gate that every turn passes before it takes an engine's time, whoever started it.

Owns the seam between sessions and a tenant's limits; the limits themselves are kept by whoever implements the gate.
A turn that a tool's output starts passes it just as one that a user starts.
"""

from typing import Protocol

from graftwork.engine.core.requests import KvLimits
from graftwork.platform.tenancy.principals import Principal


class AdmissionTicket(Protocol):
    """What one turn holds of its tenant's limits; the first of `settle` and `refund` counts."""

    def rate_limit_headers(self) -> dict[str, str]:
        """The `x-ratelimit-*` headers as of the reservation."""
        ...

    async def settle(self, actual_tokens: int) -> None:
        """The turn has ended and used this many tokens."""
        ...

    async def refund(self) -> None:
        """The turn used nothing."""
        ...


class AdmissionGate(Protocol):
    """A tenant's limits, as sessions need them."""

    async def reserve(self, principal: Principal, estimated_tokens: int) -> AdmissionTicket:
        """Room for one turn. Raises LimitExceeded."""
        ...

    async def kv_limits(self, principal: Principal) -> KvLimits:
        """Bytes of KV that the tenant may keep on each tier."""
        ...

    async def max_sessions(self, principal: Principal) -> int | None:
        """How many sessions the tenant may have open; None is no limit."""
        ...
