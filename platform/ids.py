"""Defines the types of identifiers, and makes new identifiers.

Each new identifier begins with a prefix for its type. Identifiers with the same prefix sort by the time of their
creation.
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
"""A digest that identifies a group of requests that may share cached prefixes (a domain), usually one tenant.

The engine cannot find out from the digest which tenant it is.
"""

FIRST_GENERATION = 1
"""The generation of engines before any upgrade of what they serve under one model name."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def new_id(prefix: str) -> str:
    """Returns a new identifier: `prefix`, `_` and 26 characters.

    The characters encode the present time in milliseconds (48 bits) and 80 random bits: a ULID in lower case.
    """
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    characters = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(characters)}"
