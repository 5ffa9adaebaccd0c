"""Makes, parses and hashes API keys.

    gw_<public id>_<secret>     a tenant's key
    gwa_<public id>_<secret>    the admin key

The public id finds the key's row in the database. The row does not contain the secret (256 random bits), but an
HMAC-SHA256 of the key. The HMAC's own key is called the pepper. This hash is fast, and that is safe: nobody can guess
the secret, and a slow hash would let attackers overload the server.
Invariant: this module never logs, and no repr shows a secret.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from enum import StrEnum

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
    if len(token) > _MAX_CHARACTERS or not public_id or not secret or not token.isascii():
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
