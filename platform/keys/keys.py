"""Makes, parses and hashes API keys.

    gw_<public id>_<secret><checksum>     a tenant's key
    gwa_<public id>_<secret><checksum>    the admin key

The public id finds the key's row in the database. The row does not contain the secret (256 random bits), but an
HMAC-SHA256 of the key. The HMAC's own key is called the pepper. This hash is fast, and that is safe: nobody can guess
the secret, and a slow hash would let attackers overload the server.

The checksum is the CRC-32 of the text before it, as six digits of base 62. With it a scanner for leaked keys knows a key
from text that only looks like one, without the server. Keys that older versions of the server have made end with the
secret, and stay valid (docs/operations.md).
Invariant: this module never logs, and no repr shows a secret.
"""

import hashlib
import hmac
import secrets
import zlib
from dataclasses import dataclass, field
from enum import StrEnum

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PUBLIC_ID_CHARACTERS = 12
_SECRET_CHARACTERS = 43  # 62^43 > 2^256
_CHECKSUM_CHARACTERS = 6  # 62^6 > 2^32
_MAX_CHARACTERS = 200


class KeyKind(StrEnum):
    """The kind of an API key: a tenant's key or the admin key. The value is the text at the start of the key."""

    TENANT = "gw"
    ADMIN = "gwa"


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The three parts of an API key: kind, public id and secret. The checksum is a part of the secret's text."""

    kind: KeyKind
    public_id: str
    secret: str = field(repr=False)

    @property
    def plaintext(self) -> str:
        """The whole API key with its secret. Show it only once, and never store or log it."""
        return f"{self.kind}_{self.public_id}_{self.secret}"


def make_key(kind: KeyKind) -> KeyParts:
    """Makes a new API key of this kind, with a random public id and a random secret."""
    public_id, secret = _random_text(_PUBLIC_ID_CHARACTERS), _random_text(_SECRET_CHARACTERS)
    return KeyParts(kind, public_id, secret + checksum(f"{kind}_{public_id}_{secret}"))


def checksum(text: str) -> str:
    """Returns the checksum of a key: the CRC-32 of the text before it, as six digits of base 62, highest first."""
    rest, digits = zlib.crc32(text.encode()), ""
    for _ in range(_CHECKSUM_CHARACTERS):
        rest, digit = divmod(rest, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def parse_key(token: str) -> KeyParts | None:
    """Returns the parts of an API key, or None if `token` does not have the form of an API key.

    A key that is as long as one with a checksum must have the right one. Shorter keys are those of older versions.
    """
    kind, _, rest = token.partition("_")
    public_id, _, secret = rest.partition("_")
    if len(token) > _MAX_CHARACTERS or not public_id.isalnum() or not secret or not token.isascii():
        return None
    if len(secret) == _SECRET_CHARACTERS + _CHECKSUM_CHARACTERS and not _has_checksum(token):
        return None
    try:
        return KeyParts(KeyKind(kind), public_id, secret)
    except ValueError:
        return None


def _has_checksum(token: str) -> bool:
    return checksum(token[:-_CHECKSUM_CHARACTERS]) == token[-_CHECKSUM_CHARACTERS:]


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


def key_digest(key: str) -> bytes:
    """Returns a digest of a key. Code compares digests instead of keys, because digests always have the same length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
