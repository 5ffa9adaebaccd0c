"""One writer per session: who may write its running turn, and until when.

Owns the lease as a value, and the heartbeat that keeps it.
Never decides what is written: the store refuses whoever shows a lease that is no longer the session's.
A lease is lost by its epoch: whoever takes the session over raises it, and the old holder's writes meet nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from graftwork.platform.errors import CapacityAbsent, Conflict
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope


class LeaseLost(Conflict):
    """Somebody else has taken the session over; this writer must stop without writing."""

    default_code = "lease_lost"

    def __init__(self, session_id: SessionId) -> None:
        super().__init__(f"The turn of {session_id} was taken over: read the session to see where it is now.")


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The right to write one turn."""

    session_id: SessionId
    scope: TenantScope
    turn_id: TurnId
    owner: str
    epoch: int


class LeaseKeeper(Protocol):
    """Where leases live: the sessions' own rows, or a store that several gateways share."""

    async def renew(self, lease: SessionLease) -> bool:
        """Extend the lease; True if somebody asked for the turn to be cancelled. Raises LeaseLost, CapacityAbsent."""
        ...


Pause = Callable[[float], Awaitable[None]]
"""Waits that many seconds; `asyncio.sleep` outside tests."""


async def keep_alive(lease: SessionLease, keeper: LeaseKeeper, interval_s: float, pause: Pause = asyncio.sleep) -> None:
    """Renew the lease every `interval_s` until a cancel is asked for. Raises LeaseLost.

    A keeper that is away takes nothing from the lease: the beat after that tells whether it still holds.
    """
    cancel_requested = False
    while not cancel_requested:
        await pause(interval_s)
        with suppress(CapacityAbsent):
            cancel_requested = await keeper.renew(lease)
