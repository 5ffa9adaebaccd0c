"""Decides whether a request can be served at all, and when a refused client should try again.

Owns the checks of a single request, and the measured rate of finished requests.
Never checks whether memory is free now: the scheduler does.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random

from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT, EngineRequest
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.scheduler.request_state import RequestState, history_for
from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest

_SMOOTHING = 0.2
_SHORTEST_S = 0.05
_LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of an engine (pages, batch, queue, context, vocabulary) that the scheduler must keep to."""

    page_tokens: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class RequestValidator:
    """Checks requests before they are queued, and creates their RequestState.

    Draws a random seed for a request without one. Has no other side effect.
    """

    def __init__(self, limits: SchedulerLimits, scopes: CacheScopes, clock: Clock, seeds: Random) -> None:
        self._limits = limits
        self._scopes = scopes
        self._clock = clock
        self._seeds = seeds

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for a request that this engine can never serve."""
        prompt, limits = request.prompt_token_ids, self._limits
        if not prompt:
            raise InvalidRequest("The prompt is empty: send at least one token.", param="prompt")
        if len(prompt) + 1 > limits.context_tokens:
            raise ContextLengthExceeded.of_prompt(
                len(prompt), limits.context_tokens, "prompt", max_tokens=request.sampling.max_tokens
            )
        _check_mixture(request)
        check_vocabulary(request, limits.vocab_size)
        request.sampling.check()

    def new_state(self, request: EngineRequest) -> RequestState:
        """Returns the initial RequestState of a request that `check` has accepted."""
        request = replace(request, adapters=tuple(sorted(request.adapters)))  # one order, so that mixtures share KV
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self._limits.eos_token_ids
        return RequestState(
            request=request,
            scope=self._scopes.for_request(request, self._limits.page_tokens),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            arrived_at=self._clock.monotonic(),
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
            max_total_tokens=min(len(request.prompt_token_ids) + sampling.max_tokens, self._limits.context_tokens),
            token_ids=list(request.prompt_token_ids),
            history=history_for(request),
        )


def _check_mixture(request: EngineRequest) -> None:
    digests = request.adapter_digests
    if len(digests) > MAX_MIXTURE or len(set(digests)) < len(digests):
        raise InvalidRequest(
            f"A request mixes at most {MAX_MIXTURE} adapters, each named once; this one names {len(digests)}.",
            param="adapters",
        )
    if not all(math.isfinite(use.weight) and abs(use.weight) <= MAX_MIXTURE_WEIGHT for use in request.adapters):
        raise InvalidRequest(
            f"An adapter's weight in a mixture is a number from {-MAX_MIXTURE_WEIGHT} to {MAX_MIXTURE_WEIGHT}.",
            param="adapters",
        )


def check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    """Raises InvalidRequest if a token id of the request is outside the vocabulary of `vocab_size` tokens.

    The error names the field of the request.
    """
    sampling = request.sampling
    named: Mapping[str, Iterable[int]] = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": (token_id for token_id, _ in sampling.logit_bias),
    }
    for param, token_ids in named.items():
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            message = f"Token id {outside} is outside the vocabulary of {vocab_size} tokens."
            raise InvalidRequest(message, param=param)


class ThroughputEstimate:
    """Estimates the average time from the end of one request to the end of the next.

    If the queue is full, a client is told to try again after this time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_finished_at: float | None = None
        self._seconds_between = 1.0

    def record_finished(self) -> None:
        """Records that a request finishes at the time of this call."""
        now = self._clock.monotonic()
        if self._last_finished_at is not None:
            gap = now - self._last_finished_at
            self._seconds_between += _SMOOTHING * (gap - self._seconds_between)
        self._last_finished_at = now

    def retry_after_s(self) -> float:
        """Returns how many seconds a client should wait before it tries again to send a request to a full queue."""
        return min(max(self._seconds_between, _SHORTEST_S), _LONGEST_S)
