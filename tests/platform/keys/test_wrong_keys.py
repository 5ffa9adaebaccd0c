"""The limit on wrong API keys."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.keys.wrong_keys import WrongKeyLimit, client_network

ATTACKER, OTHER = "192.0.2.1", "192.0.2.2"


class Pauses:
    """Records for how long the limit wants to wait, and moves the clock instead."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._clock.advance(seconds)


async def send(limit: WrongKeyLimit, address: str, key: str) -> bool:
    """Sends a wrong key. Returns whether the database was asked for it."""
    try:
        await limit.check(address, key)
    except LimitExceeded:
        return False
    limit.note_wrong(address, key)
    return True


async def test_flood_of_wrong_keys(manual_clock: ManualClock) -> None:
    """After a burst, wrong keys are looked up at no more than one a second, and refusals make the sender wait."""
    pauses = Pauses(manual_clock)
    limit = WrongKeyLimit(manual_clock, 20, pauses)
    started_at = manual_clock.monotonic()

    looked_up = [await send(limit, ATTACKER, f"gw_wrong_{number}") for number in range(200)]

    seconds = manual_clock.monotonic() - started_at
    assert looked_up[:20] == [True] * 20
    assert sum(looked_up) <= 20 + seconds + 1
    assert len(pauses.seconds) == looked_up.count(False) > 50


async def test_other_addresses(manual_clock: ManualClock) -> None:
    """A flood from one address slows down nobody else."""
    pauses = Pauses(manual_clock)
    limit = WrongKeyLimit(manual_clock, 20, pauses)
    for number in range(100):
        await send(limit, ATTACKER, f"gw_wrong_{number}")
    pauses.seconds.clear()

    assert await send(limit, OTHER, "gw_wrong_first")
    assert pauses.seconds == []


async def test_known_key_behind_the_same_proxy(manual_clock: ManualClock) -> None:
    """A key that was right passes from any address, until it turns out to be wrong."""
    limit = WrongKeyLimit(manual_clock, 20, Pauses(manual_clock))
    limit.note_right("gw_right")
    for number in range(30):
        limit.note_wrong(ATTACKER, f"gw_wrong_{number}")

    assert await send(limit, ATTACKER, "gw_right")  # it was revoked
    assert not await send(limit, ATTACKER, "gw_right")


async def test_forgiveness(manual_clock: ManualClock) -> None:
    """A client that waits may try again."""
    limit = WrongKeyLimit(manual_clock, 20, Pauses(manual_clock))
    for number in range(20):
        limit.note_wrong(ATTACKER, f"gw_wrong_{number}")

    with pytest.raises(LimitExceeded) as refusal:
        await limit.check(ATTACKER, "gw_next")
    assert refusal.value.retry_after_s is not None
    manual_clock.advance(refusal.value.retry_after_s)

    assert await send(limit, ATTACKER, "gw_next")


async def test_bounded_memory(manual_clock: ManualClock) -> None:
    """An attacker with many addresses only pushes out the oldest ones."""
    limit = WrongKeyLimit(manual_clock, 20, Pauses(manual_clock))
    for _ in range(20):
        limit.note_wrong(ATTACKER, "gw_wrong")
    for number in range(10_000):
        limit.note_wrong(f"10.0.{number // 256}.{number % 256}", "gw_wrong")

    assert await send(limit, ATTACKER, "gw_wrong")


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("", "", True),
    ],
)
def test_networks(one: str, other: str, are_same: bool) -> None:
    """IPv6 clients count by their /64 network, IPv4 clients by their address, in both spellings."""
    assert (client_network(one) == client_network(other)) is are_same
