"""Defines the types of identifiers, and makes new identifiers.

Each new identifier begins with a prefix for its type. Identifiers with the same prefix sort by the time of their
creation.
"""

import os
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
OrganisationId = NewType("OrganisationId", str)
PersonId = NewType("PersonId", str)
EndUserId = NewType("EndUserId", str)
"""A digest of the name of a tenant's end user."""

IsolationDomain = NewType("IsolationDomain", bytes)
"""A digest that identifies a group of requests that may share cached prefixes (a domain), usually one tenant.

The engine cannot find out from the digest which tenant it is.
"""

FIRST_GENERATION = 1
"""The generation of engines before any upgrade of what they serve under one model name."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
"""The two characters of each number of ten bits."""
_SHIFTS = range(120, -1, -10)


def new_id(prefix: str) -> str:
    """Returns a new identifier: `prefix`, `_` and 26 characters.

    The characters encode the present time in milliseconds (48 bits) and 80 random bits: a ULID in lower case.
    """
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return f"{prefix}_{''.join([_PAIRS[(value >> shift) & 1023] for shift in _SHIFTS])}"
