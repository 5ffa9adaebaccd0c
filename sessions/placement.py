"""Which engine serves a turn: the one that holds most of its prefix, unless it is much busier than another.

Owns the choice as a pure function; never asks an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """What one engine could do for a turn."""

    address: str
    cached_tokens: int
    """Tokens of the turn's prompt that it holds already."""
    has_adapter: bool
    waiting_requests: int
    tokens_per_request: int
    """Prompt tokens that one waiting request delays a newcomer by, as measured."""


def choose(offers: Sequence[EngineOffer], prompt_tokens: int) -> EngineOffer | None:
    """The engine that can begin to answer first; on a tie one that has the adapter, then by address."""

    def cost(offer: EngineOffer) -> tuple[int, bool, str]:
        to_compute = prompt_tokens - min(offer.cached_tokens, prompt_tokens)
        delay = offer.waiting_requests * offer.tokens_per_request
        return (to_compute + delay, not offer.has_adapter, offer.address)

    return min(offers, key=cost, default=None)
