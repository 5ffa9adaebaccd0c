"""From a request to a sequence, or to the error that says why it cannot be served.

Owns what can be known of a request by itself; never whether there is room for it. Pure but for the seed that is drawn
for a request without one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random

from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT, EngineRequest
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.scheduler.request_state import Sequence, history_for
from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The engine's sizes, as far as scheduling is concerned."""

    page_tokens: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class Intake:
    """Checks requests and makes sequences of them."""

    def __init__(self, limits: SchedulerLimits, scopes: CacheScopes, clock: Clock, seeds: Random) -> None:
        self._limits = limits
        self._scopes = scopes
        self._clock = clock
        self._seeds = seeds

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for what this engine can never serve."""
        prompt, limits = request.prompt_token_ids, self._limits
        if not prompt:
            raise InvalidRequest("The prompt is empty: send at least one token.", param="prompt")
        if len(prompt) + 1 > limits.context_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens; this model's context is {limits.context_tokens} tokens, the "
                "answer included. Shorten the prompt.",
                param="prompt",
            )
        _check_mixture(request)
        check_vocabulary(request, limits.vocab_size)
        request.sampling.check()

    def sequence(self, request: EngineRequest) -> Sequence:
        """A sequence that has not begun."""
        request = replace(request, adapters=tuple(sorted(request.adapters)))  # a sum has no order; its cache has
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self._limits.eos_token_ids
        return Sequence(
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
    """Raises InvalidRequest naming the field that holds an id which no token has."""
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
