"""Makes the API keys that tenants are given, and checks what an operator asks of them.

Never stores a key (`tenancy.py` does). The plaintext of a key exists only in what `make` returns.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from graftwork.platform.errors import Conflict, ValidationFailed
from graftwork.platform.ids import KeyId, TenantId, new_id
from graftwork.platform.keys.keys import KeyKind, hash_key, make_key
from graftwork.platform.keys.networks import checked_networks
from graftwork.platform.keys.scopes import checked_adapters, checked_scopes
from graftwork.platform.tenancy.tenants import ApiKey

MAX_OVERLAP_S = 30 * 86_400.0
"""The longest time for which a rotated key may stay valid."""
_MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a new API key shall allow."""

    name: str
    scopes: Collection[str] | None = None
    """The scopes; None means all."""
    adapters: Collection[str] | None = None
    """The models that the key may name, without versions and aliases; None means all."""
    allowed_ips: Collection[str] | None = None
    """The networks (CIDR) from which the key may be used; None means all."""
    expires_at: float | None = None
    """The time at which the key ends, in unix seconds; None means never."""

    def make(
        self, tenant_id: TenantId, now: float, pepper: bytes, first_key_id: KeyId | None = None
    ) -> tuple[ApiKey, str]:
        """Returns the key, as the server stores it, and its plaintext. Raises ValidationFailed for a wrong value.

        `first_key_id` is the first of the keys that rotations have replaced up to this one; None for a first key.
        """
        check_name(self.name)
        parts = make_key(KeyKind.TENANT)
        key = ApiKey(
            id=KeyId(new_id("key")),
            tenant_id=tenant_id,
            name=self.name,
            public_id=parts.public_id,
            scopes=checked_scopes(self.scopes),
            adapters=checked_adapters(self.adapters),
            allowed_ips=checked_networks(self.allowed_ips),
            created_at=now,
            expires_at=_checked_time(self.expires_at),
            revoked_at=None,
            last_used_at=None,
            replaced_by=None,
            key_hash=hash_key(parts, pepper),
            first_key_id=first_key_id,
        )
        return key, parts.plaintext


def successor_of(old: ApiKey, expires_at: float | None, now: float) -> NewKey:
    """Returns a new key that allows the same as `old`, which is rotated at `now`. None is the end that `old` has.

    Raises Conflict if the old key was revoked, has expired, or was rotated before.
    """
    if old.revoked_at is not None:
        raise Conflict("A revoked key cannot be rotated; create a new one.", code="key_revoked")
    if old.replaced_by is not None:
        message = f"This key was rotated before; rotate {old.replaced_by}, which has replaced it."
        raise Conflict(message, code="key_replaced")
    if old.is_expired(now):
        raise Conflict("An expired key cannot be rotated; create a new one.", code="key_expired")
    ends_at = old.expires_at if expires_at is None else expires_at
    return NewKey(old.name, old.scopes, old.adapters, old.allowed_ips, ends_at)


def end_of_rotated(old: ApiKey, overlap_s: float, now: float) -> float:
    """Returns when a key ends that is rotated at `now`: after the overlap, or at its own end if that is earlier.

    Raises ValidationFailed for an overlap below 0 or above 30 days.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        message = f"overlap_s must be from 0 to {MAX_OVERLAP_S:.0f} seconds, which is 30 days."
        raise ValidationFailed(message, param="overlap_s")
    return min(math.inf if old.expires_at is None else old.expires_at, now + overlap_s)


def audit_details(key: ApiKey) -> dict[str, Any]:
    """Returns what a key allows, for the audit log."""
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapters": None if key.adapters is None else sorted(key.adapters),
        "allowed_ips": None if key.allowed_ips is None else list(key.allowed_ips),
        "expires_at": key.expires_at,
    }


def check_name(name: str) -> None:
    """Raises ValidationFailed for a name of a tenant or a key that is empty, too long or not printable."""
    if not name.strip() or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValidationFailed(f"name must have 1 to {_MAX_NAME_CHARACTERS} printable characters.", param="name")


def _checked_time(at: float | None) -> float | None:
    if at is not None and not math.isfinite(at):
        raise ValidationFailed("expires_at must be a time in unix seconds.", param="expires_at")
    return at
