"""Tests of the heartbeat of a running turn."""

import pytest

from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import SessionId, TenantId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.lease import LeaseLost, SessionLease, keep_alive

LEASE = SessionLease(SessionId("ses_1"), TenantScope(TenantId("ten_1")), TurnId("turn_1"), "me", 1)


class ScriptedKeeper:
    """Implements LeaseKeeper: answers a cancel, or loses the lease, at the third renewal."""

    def __init__(self, *, loses: bool, is_away_at: int | None = None) -> None:
        self.renewals = 0
        self._loses = loses
        self._is_away_at = is_away_at

    async def renew(self, lease: SessionLease) -> bool:
        self.renewals += 1
        if self.renewals == self._is_away_at:
            raise Unavailable("gone")
        if self.renewals == 3 and self._loses:
            raise LeaseLost(lease.session_id)
        return self.renewals == 3


async def test_heartbeat_ends_when_a_cancel_is_asked_for() -> None:
    """The lease is renewed once in each interval until a cancel is requested."""
    keeper = ScriptedKeeper(loses=False)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    await keep_alive(LEASE, keeper, 10.0, pause)

    assert keeper.renewals == 3
    assert pauses == [10.0, 10.0, 10.0]


async def test_heartbeat_outlives_a_store_that_is_away() -> None:
    """A renewal that does not reach the store is followed by the next one."""
    keeper = ScriptedKeeper(loses=False, is_away_at=2)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    await keep_alive(LEASE, keeper, 10.0, pause)

    assert len(pauses) == keeper.renewals == 3


async def test_heartbeat_fails_when_the_lease_is_lost() -> None:
    """A lost lease is noticed at the next renewal."""

    async def pause(seconds: float) -> None: ...

    with pytest.raises(LeaseLost):
        await keep_alive(LEASE, ScriptedKeeper(loses=True), 10.0, pause)
