"""Defines the lease of a session. It allows one writer at a time for the session's running turn.

Owns the lease as a value, and the heartbeat that renews it. Never writes: the store checks the lease of each write.
A process that takes over a session raises its epoch. Then writes with the old epoch change nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from graftwork.platform.errors import Conflict, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope


class LeaseLost(Conflict):
    """Raised to a writer whose session another process has taken over. The writer must stop."""

    default_code = "lease_lost"

    def __init__(self, session_id: SessionId) -> None:
        super().__init__(f"The turn of {session_id} was taken over: read the session to see where it is now.")


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The right to write the events and the outcome of one turn."""

    session_id: SessionId
    scope: TenantScope
    turn_id: TurnId
    owner: str
    epoch: int


class LeaseKeeper(Protocol):
    """The store that holds the leases."""

    async def renew(self, lease: SessionLease) -> bool:
        """Renews the lease, and returns whether a cancel is requested. Raises LeaseLost or Unavailable."""
        ...


Pause = Callable[[float], Awaitable[None]]
"""A function that waits for a number of seconds: `asyncio.sleep`, except in tests."""


async def keep_alive(lease: SessionLease, keeper: LeaseKeeper, interval_s: float, pause: Pause = asyncio.sleep) -> None:
    """Renews the lease every `interval_s` until a cancel is requested. Raises LeaseLost.

    Skips a renewal that cannot reach the store. The next renewal shows whether the lease is still valid.
    """
    cancel_requested = False
    while not cancel_requested:
        await pause(interval_s)
        with suppress(Unavailable):
            cancel_requested = await keeper.renew(lease)
