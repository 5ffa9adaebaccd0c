"""Defines what engines and gateways share about the bounds of the queue: what is left of them, and the refusal.

Owns the error of a request that may not wait. Decides nothing: engine/scheduler/queue_bounds.py does, and says with the
engine's load what it would decide about the next requests of domains (usually, one domain is one tenant) with many waiting.
"""

from typing import NamedTuple

from graftwork.platform.errors import CapacityContended


class QueueRoom(NamedTuple):
    """How many more requests of one domain may wait. A domain without one is far from its bounds."""

    domain: str
    """The domain's bytes in hexadecimal digits."""
    requests: int
    """Its waiting requests."""
    tokens: int
    """The tokens of their prompts."""
    requests_left: int
    """So many more requests may wait, now; none if this is 0 or less."""
    tokens_left: int
    """Their prompts may have so many tokens together."""
    retry_after_s: float
    """After how many seconds a client should send a request again that may not wait."""


def too_many_of_yours(requests: int, tokens: int, retry_after_s: float) -> CapacityContended:
    """Returns the error for a request of a domain of which so many requests, with so many prompt tokens, wait already."""
    size = f"{requests} requests with {tokens} prompt tokens"
    return cannot_wait(f"{size} of yours wait, and no more may", retry_after_s)


def cannot_wait(reason: str, retry_after_s: float) -> CapacityContended:
    """Returns the error for a request that may not wait."""
    message = f"This request cannot wait: {reason}. Send fewer requests at a time, and try again later."
    return CapacityContended(message, retry_after_s=retry_after_s)
