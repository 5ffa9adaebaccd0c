"""Decides which engine gets a request. Computes with numbers only: never talks to an engine, never keeps a state.

    seconds to the first token = slowness × (uncached prompt + queue, at the engine's own speed
                                             + load of the adapter + pages that are missing)

The engine of the session keeps its requests until another engine is faster by more than a margin: then waiting costs
more than restoring. Among engines that are equally fast, the one with fewer requests of two random ones is taken.
Sources: the power of two choices (Mitzenmacher 2001); cache-aware routing by estimated time to first token, as in
SGLang's router and llm-d.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

DEFAULT_PREFILL_TOKEN_S = 0.001
"""Seconds for each prompt token of an engine that has not measured its speed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of an engine."""

    prompt_tokens: int
    pages: int
    """KV pages of the prompt."""
    page_tokens: int = 16
    needs_adapter: bool = False
    key: bytes = b""
    """Equal for requests that should meet at one engine, such as those of one session. Only HashRing reads it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known about one engine when a request must be placed."""

    replica_id: str
    cached_tokens: int = 0
    """Tokens at the start of the prompt whose KV the engine probably has."""
    queued_tokens: int = 0
    """Prompt tokens of other requests that it must compute first."""
    free_pages: int = 0
    """Device pages that no running request holds."""
    requests: int = 0
    """Requests that wait or run there."""
    has_adapters: bool = True
    """Whether the adapters of the request are on its device."""
    adapter_load_s: float | None = None
    """The seconds that it takes to load an adapter; None if it has loaded none."""
    prefill_token_s: float = DEFAULT_PREFILL_TOKEN_S
    slowness: float = 1.0
    """How many times slower than its peers the engine works; at least 1."""
    has_session: bool = False
    """Whether the request continues a session whose last request was there."""


@dataclass(frozen=True, slots=True)
class PlacementCosts:
    """The constants of the estimate, in seconds unless they say otherwise."""

    adapter_load_s: float = 0.1
    """The time to load an adapter to the device of an engine that has not measured it."""
    move_s: float = 0.05
    """How much faster another engine must be before a session moves: what the move itself costs."""
    move_share: float = 0.1
    """The same as a part of the estimate at the session's engine."""
    tie_s: float = 0.005
    """Estimates that differ by less are equal."""
    tie_share: float = 0.05
    """The same as a part of the least estimate."""


DEFAULT_COSTS = PlacementCosts()


def first_token_s(demand: Demand, candidate: Candidate, costs: PlacementCosts = DEFAULT_COSTS) -> float:
    """Estimates the seconds until the first token of a request, if this engine got it."""
    uncached = max(demand.prompt_tokens - candidate.cached_tokens, 1)
    missing_pages = max(demand.pages - candidate.cached_tokens // demand.page_tokens - candidate.free_pages, 0)
    tokens = uncached + candidate.queued_tokens + missing_pages * demand.page_tokens
    load_s = costs.adapter_load_s if candidate.adapter_load_s is None else candidate.adapter_load_s
    adapter_s = load_s if demand.needs_adapter and not candidate.has_adapters else 0.0
    return candidate.slowness * (tokens * candidate.prefill_token_s + adapter_s)


class PlacementPolicy(Protocol):
    """Chooses one of several engines for a request."""

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Candidate:
        """Returns one of `candidates`, which are not empty."""
        ...


class LeastSeconds:
    """Takes the engine with the least seconds to the first token; see the module's description."""

    def __init__(self, random: Random, costs: PlacementCosts = DEFAULT_COSTS) -> None:
        self._random = random
        self._costs = costs

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Candidate:
        seconds = [first_token_s(demand, candidate, self._costs) for candidate in candidates]
        least_s = min(seconds)
        for candidate, own_s in zip(candidates, seconds, strict=True):
            if candidate.has_session and own_s <= least_s + self._costs.move_s + self._costs.move_share * own_s:
                return candidate
        limit_s = least_s + self._costs.tie_s + self._costs.tie_share * least_s
        equal = [one for one, own_s in zip(candidates, seconds, strict=True) if own_s <= limit_s]
        two = self._random.sample(equal, min(2, len(equal)))
        return min(two, key=lambda one: one.requests * one.slowness)


class RoundRobin:
    """Takes one engine after another. For comparison."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class HashRing:
    """Takes the engine that the demand's key belongs to, by rendezvous hashing: if an engine goes, only the keys of that
    engine move. For comparison.
    """

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=lambda one: _weight(demand.key, one.replica_id))


def _weight(key: bytes, replica_id: str) -> bytes:
    return hashlib.blake2b(key + replica_id.encode(), digest_size=8).digest()
