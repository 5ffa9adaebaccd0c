"""Makes, parses and hashes API keys, and slows down clients that send many wrong ones.

    gw_<public id>_<secret>     a tenant's key
    gwa_<public id>_<secret>    the admin key

The public id finds the key's row in the database. The row does not contain the secret (256 random bits), but an
HMAC-SHA256 of the key. The HMAC's own key is called the pepper. This hash is fast, and that is safe: nobody can guess
the secret, and a slow hash would let attackers overload the server.

An IP address may send some wrong keys at once, and then one per second. If it sends more, each further request with an
unknown key waits one second and is refused, and the database is not asked. Keys that were right before are never slowed
down, because a proxy's address can have many clients behind it. Each process counts for itself, in limited memory.
Invariant: this module never logs, and no repr shows a secret.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

from graftwork.platform.clock import Clock
from graftwork.platform.errors import LimitExceeded

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PUBLIC_ID_CHARACTERS = 12
_SECRET_CHARACTERS = 43  # 62^43 > 2^256
_MAX_CHARACTERS = 200


class KeyKind(StrEnum):
    """The kind of an API key: a tenant's key or the admin key. The value is the text at the start of the key."""

    TENANT = "gw"
    ADMIN = "gwa"


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The three parts of an API key: kind, public id and secret."""

    kind: KeyKind
    public_id: str
    secret: str = field(repr=False)

    @property
    def plaintext(self) -> str:
        """The whole API key with its secret. Show it only once, and never store or log it."""
        return f"{self.kind}_{self.public_id}_{self.secret}"


def make_key(kind: KeyKind) -> KeyParts:
    """Makes a new API key of this kind, with a random public id and a random secret."""
    return KeyParts(kind, _random_text(_PUBLIC_ID_CHARACTERS), _random_text(_SECRET_CHARACTERS))


def with_new_secret(public_id: str) -> KeyParts:
    """Makes a tenant's API key that has this public id and a new random secret."""
    return KeyParts(KeyKind.TENANT, public_id, _random_text(_SECRET_CHARACTERS))


def parse_key(token: str) -> KeyParts | None:
    """Returns the parts of an API key, or None if `token` does not have the form of an API key."""
    kind, _, rest = token.partition("_")
    public_id, _, secret = rest.partition("_")
    if len(token) > _MAX_CHARACTERS or not public_id.isalnum() or not secret or not token.isascii():
        return None
    try:
        return KeyParts(KeyKind(kind), public_id, secret)
    except ValueError:
        return None


def hash_key(key: KeyParts, pepper: bytes) -> bytes:
    """Returns the hash of an API key that the database stores: an HMAC-SHA256 under `pepper`, 32 bytes.

    The hash covers the whole key. So if a hash is copied to the row of another public id, no key matches it there.
    """
    return hmac.digest(pepper, b"graftwork key\0" + key.plaintext.encode(), hashlib.sha256)


def matches(key: KeyParts, stored: bytes | None, pepper: bytes) -> bool:
    """Returns whether `stored` is the hash of `key`. `stored` is None if no key has this public id.

    The check takes equally long for an unknown public id and for a wrong secret.
    """
    expected = stored if stored is not None else bytes(hashlib.sha256().digest_size)
    return hmac.compare_digest(hash_key(key, pepper), expected) and stored is not None


def redacted(public_id: str) -> str:
    """Returns the form of a tenant's API key that may be shown again later: `gw_<public id>_…`, without the secret."""
    return f"{KeyKind.TENANT}_{public_id}_…"


def _random_text(num_characters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_characters))


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


def key_digest(key: str) -> bytes:
    """Returns a digest of a key. Code compares digests instead of keys, because digests always have the same length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
