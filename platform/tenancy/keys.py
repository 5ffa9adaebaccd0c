"""Makes, reads and hashes API keys.

    gw_<public id>_<secret>     a tenant's key
    gwa_<public id>_<secret>    the admin key

The public id finds the row; the secret, 256 random bits, is kept only as HMAC-SHA256 under the pepper.
A fast hash is right here. The secret cannot be guessed, and a slow hash would let attackers exhaust the server.
Invariant: nothing here logs, and no repr shows a secret.
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
    """The kind of a key: the word that the key begins with."""

    TENANT = "gw"
    ADMIN = "gwa"


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of a key: kind, public id and secret."""

    kind: KeyKind
    public_id: str
    secret: str = field(repr=False)

    @property
    def plaintext(self) -> str:
        """The whole key. Show it once; never store or log it."""
        return f"{self.kind}_{self.public_id}_{self.secret}"


def make_key(kind: KeyKind) -> KeyParts:
    """Makes a new key."""
    return KeyParts(kind, _random_text(_PUBLIC_ID_CHARACTERS), _random_text(_SECRET_CHARACTERS))


def with_new_secret(public_id: str) -> KeyParts:
    """Makes a tenant's key with an existing public id and a new secret."""
    return KeyParts(KeyKind.TENANT, public_id, _random_text(_SECRET_CHARACTERS))


def parse_key(token: str) -> KeyParts | None:
    """Returns the parts of a well-formed key; None for any other text."""
    kind, _, rest = token.partition("_")
    public_id, _, secret = rest.partition("_")
    if len(token) > _MAX_CHARACTERS or not public_id or not secret or not token.isascii():
        return None
    try:
        return KeyParts(KeyKind(kind), public_id, secret)
    except ValueError:
        return None


def hash_key(key: KeyParts, pepper: bytes) -> bytes:
    """Returns the hash that is stored for a key, 32 bytes.

    The hash covers the public id, so a hash copied to another row does not match.
    """
    return hmac.digest(pepper, b"graftwork key\0" + key.plaintext.encode(), hashlib.sha256)


def matches(key: KeyParts, stored: bytes | None, pepper: bytes) -> bool:
    """Returns whether `key` has the stored hash.

    Takes the same time for an unknown key (`stored` is None) as for a wrong one.
    """
    expected = stored if stored is not None else bytes(hashlib.sha256().digest_size)
    return hmac.compare_digest(hash_key(key, pepper), expected) and stored is not None


def redacted(public_id: str) -> str:
    """Returns a key in the form that may be shown later, without its secret."""
    return f"{KeyKind.TENANT}_{public_id}_…"


def _random_text(num_characters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_characters))
