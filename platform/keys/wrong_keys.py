"""Slows down clients that send many wrong API keys.

An IP address may send some wrong keys at once, and then one per second. If it sends more, each further request with an
unknown key waits one second and is refused, and the database is not asked. Keys that were right before are never slowed
down, because a proxy's address can have many clients behind it. A key is never refused for what other addresses have
sent. Each process counts for itself, in limited memory.
Invariant: this module never logs, and holds digests of keys instead of keys.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

from graftwork.platform.clock import Clock
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.keys.keys import key_digest

Key = TypeVar("Key")
Value = TypeVar("Value")

_PER_SECOND = 1.0
_PENALTY_S = 1.0
"""How long a refused request waits. A client that sends its next key after an answer then costs next to nothing."""
_MOST_ADDRESSES = 10_000
_MOST_KEYS = 10_000


class WrongKeyLimit:
    """Counts wrong API keys by client address, and remembers which keys were right."""

    def __init__(self, clock: Clock, burst: int, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """`burst` is the number of wrong keys that an address may send at once. `pause` waits for a number of seconds."""
        self._clock = clock
        self._burst = burst
        self._pause = pause
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By address, least recently used first: wrong keys that still count, and when they were counted."""
        self._right_keys: OrderedDict[bytes, None] = OrderedDict()
        """Digests of keys, least recently used first."""

    async def check(self, address: str, key: str) -> None:
        """Checks whether a request with this API key may be processed. Does nothing if it may.

        If the address has sent too many wrong keys, and this key was not right before, waits one second and raises
        LimitExceeded.
        """
        if key_digest(key) in self._right_keys or self._wrong_keys(client_network(address)) < self._burst:
            return
        await self._pause(_PENALTY_S)
        raise LimitExceeded(
            "Too many wrong API keys came from your address: check your key, and try again shortly.",
            code="too_many_wrong_keys",
            retry_after_s=1 / _PER_SECOND,
        )

    def note_right(self, key: str) -> None:
        _use(self._right_keys, key_digest(key), None, _MOST_KEYS)

    def note_wrong(self, address: str, key: str) -> None:
        """Counts one wrong API key for the client's address. If the key was right before, it is no longer remembered as
        right.
        """
        self._right_keys.pop(key_digest(key), None)
        network = client_network(address)
        _use(self._spent, network, (self._wrong_keys(network) + 1, self._clock.monotonic()), _MOST_ADDRESSES)

    def _wrong_keys(self, network: str) -> float:
        """Returns how many wrong keys count at this moment. `_PER_SECOND` of them are forgotten each second."""
        count, counted_at = self._spent.get(network, (0.0, 0.0))
        return max(0.0, count - (self._clock.monotonic() - counted_at) * _PER_SECOND)


def _use(entries: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Sets an entry and makes it the most recently used one. Drops the least recently used entry above `most`."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > most:
        entries.popitem(last=False)


def client_network(address: str) -> str:
    """Returns the address under which a client's wrong keys are counted.

    This is the whole IPv4 address, or the first 64 bits of an IPv6 address, because one client usually has all
    addresses of such a /64 network.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return address  # a socket that is not TCP
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{found.exploded[:19]}::/64" if isinstance(found, IPv6Address) else str(found)
