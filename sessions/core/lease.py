"""Defines the lease of a session: the right of one process to write the session's running turn.

Owns the lease as a value, and the loop that renews the lease. Never writes to the database: the store does that, and it
checks the lease at each write. The database's clock decides when a lease expires.
Invariant: a session has one writer at a time. A process that takes over a session raises the session's epoch (a
counter). From then on, writes with the old epoch are refused.
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
    """Raised if another process has taken over the session. The caller must stop writing the session's turn."""

    default_code = "lease_lost"

    def __init__(self, session_id: SessionId) -> None:
        super().__init__(f"The turn of {session_id} was taken over: read the session to see where it is now.")


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The right of one process to write the events and the outcome of one turn.

    `owner` names the process. The lease is lost when another process has raised the session's `epoch`, a counter.
    """

    session_id: SessionId
    scope: TenantScope
    turn_id: TurnId
    owner: str
    epoch: int


class LeaseKeeper(Protocol):
    """The interface of the store that keeps the leases of sessions. TurnStore implements it."""

    async def renew(self, lease: SessionLease) -> bool:
        """Renews the lease, and returns whether a client has asked to cancel the turn.

        Raises LeaseLost if another process has taken over the session, and Unavailable if the database does not answer.
        """
        ...


Pause = Callable[[float], Awaitable[None]]
"""A function that waits for a number of seconds: `asyncio.sleep`, except in tests."""


async def keep_alive(lease: SessionLease, keeper: LeaseKeeper, interval_s: float, pause: Pause = asyncio.sleep) -> None:
    """Renews the lease every `interval_s` seconds. Returns when a client has asked to cancel the turn.

    Raises LeaseLost if another process has taken over the session.
    If the store does not answer, tries again after the next interval.
    """
    cancel_requested = False
    while not cancel_requested:
        await pause(interval_s)
        with suppress(Unavailable):
            cancel_requested = await keeper.renew(lease)
