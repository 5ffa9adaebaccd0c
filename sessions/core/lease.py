"""The lease of a session: one writer for its running turn at a time.

Owns the lease as a value, and the heartbeat that renews it. Never writes: the store checks the lease of each write.
A process that takes a session over raises its epoch. Writes with the old epoch then change nothing.
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
    """Another process has taken the session over. This writer must stop."""

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
        """Renew the lease, and return whether a cancel is requested. Raises LeaseLost, Unavailable."""
        ...


Pause = Callable[[float], Awaitable[None]]
"""Waits for a number of seconds: `asyncio.sleep`, except in tests."""


async def keep_alive(lease: SessionLease, keeper: LeaseKeeper, interval_s: float, pause: Pause = asyncio.sleep) -> None:
    """Renew the lease every `interval_s` until a cancel is requested. Raises LeaseLost.

    Skips a renewal that cannot reach the store; the next one tells whether the lease still holds.
    """
    cancel_requested = False
    while not cancel_requested:
        await pause(interval_s)
        with suppress(Unavailable):
            cancel_requested = await keeper.renew(lease)
