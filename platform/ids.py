"""Defines the types of identifiers, and makes new identifiers.

Each new identifier has a prefix. Identifiers sort by the time at which they were made.
"""

import secrets
import time
from typing import NewType

TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
AdapterId = NewType("AdapterId", str)
SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
CheckpointId = NewType("CheckpointId", str)
ItemId = NewType("ItemId", str)
CallId = NewType("CallId", str)
RequestId = NewType("RequestId", str)

IsolationDomain = NewType("IsolationDomain", bytes)
"""An opaque digest that names who may share cached prefixes. The engine never learns which tenant it stands for."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def new_id(prefix: str) -> str:
    """Returns `prefix_` and 26 characters: 48 bits of milliseconds, then 80 random bits (a ULID in lower case)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    characters = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(characters)}"
