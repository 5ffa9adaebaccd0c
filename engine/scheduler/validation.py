"""Decides whether a request can be served at all.

Owns the checks of a single request. Never checks whether memory is free now: the scheduler does.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from graftwork.engine.core.pooling import PromptPool
from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.requests import MAX_CACHE_TTL_S, MAX_MIXTURE, MAX_MIXTURE_WEIGHT, EngineRequest
from graftwork.engine.core.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.kv_budget import PromptEviction
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.queue_bounds import QueueLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.ids import RequestId


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
    max_waiting_tokens: int = 2**20
    """The most prompt tokens in the queue."""
    waiting_share: float = 0.75
    """The fraction of the queue, 0 to 1, that one isolation domain (usually one tenant) may fill."""
    target_itl_s: float | None = None
    """The longest duration of a step with decoding requests, in seconds; None sets no limit. See step_time.py."""

    drafts_fill_pages: bool = True
    """Whether a draft token may be the last token of a page. Not if a full page must have the state after its last token,
    because the state after draft tokens is known only when they are accepted.
    """
    why_no_windows: str | None = None
    """Why this engine serves no rolling windows (see RollingWindow), as the end of a sentence; None if it serves them."""
    why_no_budgets: str | None = None
    """Why this engine serves no budgets of KV (see kv_budget.py), as the end of a sentence; None if it serves them."""
    most_rolling: int = 0
    """The most tokens that a rolling window may see for which texts may be longer than the context; 0 for none."""
    min_run_steps: int = 8
    """A request that has got a place in the batch keeps it for this many steps at least, whoever else waits. So a place is
    not handed back and forth: the KV of a preempted request is copied to the host and back.
    """

    def longest_text(self, sampling: SamplingParams) -> int:
        """Returns the most tokens of prompt and answer together."""
        window = sampling.rolling_window
        if window is None or window.sinks + window.window > self.most_rolling:
            return self.context_tokens
        return window.longest_text(self.context_tokens)

    @property
    def queue(self) -> QueueLimits:
        """The limits of the queue. They allow each isolation domain (usually one tenant) at least one request."""
        share = self.waiting_share
        domain_requests = max(1, math.ceil(self.max_waiting * share))
        return QueueLimits(
            self.max_waiting, self.max_waiting_tokens, domain_requests, int(self.max_waiting_tokens * share)
        )


class RequestValidator:
    """Checks requests before they are queued, and creates their RequestState.

    Has no side effect.
    """

    def __init__(self, limits: SchedulerLimits, scopes: CacheScopes, clock: Clock) -> None:
        self._limits = limits
        self._scopes = scopes
        self._clock = clock

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for a request that this engine can never serve."""
        prompt, limits = request.prompt_token_ids, self._limits
        longest = limits.longest_text(request.sampling)
        if not prompt:
            raise InvalidRequest("The prompt is empty: send at least one token.", param="prompt")
        if len(prompt) + min(1, request.sampling.max_tokens) > longest:
            raise ContextLengthExceeded.of_prompt(
                len(prompt), longest, "prompt", max_tokens=request.sampling.max_tokens
            )
        _check_mixture(request)
        _check_cache_ttl(request)
        _check_deadline(request)
        _check_reasoning(request)
        check_prompt_logprobs(request)
        _check_pooling(request)
        check_vocabulary(request, limits.vocab_size)
        request.sampling.check()
        if request.sampling.rolling_window is not None and limits.why_no_windows is not None:
            raise InvalidRequest(
                f"attention_window is not served here: {limits.why_no_windows}. Leave it out.", param="attention_window"
            )
        _check_budget(request, limits)
        _check_emitted(request, self._stop_token_ids(request.sampling), longest)

    def new_state(self, request: EngineRequest, arrived_at: float | None = None) -> RequestState:
        """Returns the initial RequestState of a request that `check` has accepted. It arrives now, or came at `arrived_at`
        on the engine's monotonic clock.
        """
        request = replace(request, adapters=tuple(sorted(request.adapters)))  # one order, so that mixtures share KV
        sampling = request.sampling
        return RequestState(
            request=request,
            scope=self._scopes.for_request(request, self._limits.page_tokens),
            seed=_seed_from_id(request.request_id) if sampling.seed is None else sampling.seed,
            arrived_at=self._clock.monotonic() if arrived_at is None else arrived_at,
            stop_token_ids=self._stop_token_ids(sampling),
            max_total_tokens=min(
                len(request.prompt_token_ids) + sampling.max_tokens, self._limits.longest_text(sampling)
            ),
            token_ids=[*request.prompt_token_ids, *request.emitted_token_ids],
            num_scored=len(request.prompt_token_ids) - 1 if request.emitted_token_ids else 0,
            history=history_for(request),
            eviction=self._eviction(request),
            pool=None if request.pooling is None else PromptPool(request.pooling, len(request.prompt_token_ids)),
        )

    def _eviction(self, request: EngineRequest) -> PromptEviction | None:
        """Returns what a request gives up of its prompt. One that generates nothing gives up nothing."""
        budget = request.sampling.kv_budget if request.sampling.max_tokens else None
        return PromptEviction.of(len(request.prompt_token_ids), budget, self._limits.page_tokens)

    def _stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end an answer."""
        eos = frozenset() if sampling.ignore_eos else self._limits.eos_token_ids
        return eos | frozenset(sampling.stop_token_ids)


def history_for(request: EngineRequest) -> TokenHistory | None:
    """Returns the token counts that the request's penalties use, before any token is generated; None without penalties.

    Only the repetition penalty looks at the tokens of the prompt. The other penalties look at the answer alone.
    """
    if not request.sampling.counts_tokens:
        return None
    return TokenHistory(request.prompt_token_ids if request.sampling.repetition_penalty != 1 else ())


def _seed_from_id(request_id: RequestId) -> int:
    """Returns the seed of a request without one, from 0 to 2^63 - 1. Gateways send a seed with every request."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1


def _check_emitted(request: EngineRequest, stop_token_ids: frozenset[int], context_tokens: int) -> None:
    """Raises InvalidRequest if no earlier run of the request can have generated its emitted tokens.

    Whether the grammar allows them is checked when the grammar is compiled.
    """
    emitted, sampling = request.emitted_token_ids, request.sampling
    if emitted and sampling.seed is None and not sampling.is_greedy:
        raise InvalidRequest(
            "A request with emitted_token_ids needs the seed of its earlier run, because its temperature is not 0.",
            param="seed",
        )
    most = min(sampling.max_tokens, context_tokens - len(request.prompt_token_ids))
    if len(emitted) > most:
        raise InvalidRequest(
            f"emitted_token_ids has {len(emitted)} tokens, and the answer may have {most}: max_tokens is "
            f"{sampling.max_tokens}, and the context has {context_tokens} tokens. Send what the earlier run has generated.",
            param="emitted_token_ids",
        )
    early = emitted[: max(len(emitted) - 1, sampling.min_tokens)]
    ended_at = next((index for index, token_id in enumerate(early) if token_id in stop_token_ids), None)
    if ended_at is not None:
        raise InvalidRequest(
            f"Token {emitted[ended_at]} at index {ended_at} of emitted_token_ids ends the answer, but an earlier run cannot "
            "have generated it there. Send what the earlier run has generated.",
            param="emitted_token_ids",
        )


def _check_budget(request: EngineRequest, limits: SchedulerLimits) -> None:
    budget, num_prompt = request.sampling.kv_budget, len(request.prompt_token_ids)
    if budget is None:
        return
    if limits.why_no_budgets is not None:
        raise InvalidRequest(f"kv_budget is not served here: {limits.why_no_budgets}. Leave it out.", param="kv_budget")
    most = limits.context_tokens - budget - 2 * limits.page_tokens
    if num_prompt > max(most, budget):
        raise InvalidRequest(
            f"The prompt has {num_prompt} tokens, and with kv_budget {budget} it may have {most}, because what is kept has "
            f"pages beside the prompt's until it is read, within a context of {limits.context_tokens} tokens. Send a smaller "
            "kv_budget, or none.",
            param="kv_budget",
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


def _check_cache_ttl(request: EngineRequest) -> None:
    ttl_s = request.cache_ttl_s
    if ttl_s is not None and not 0 < ttl_s <= MAX_CACHE_TTL_S:
        raise InvalidRequest(
            f"cache_ttl_s is {ttl_s}: send the seconds to keep the prompt, above 0 and up to {MAX_CACHE_TTL_S:.0f}, or "
            "leave it out.",
            param="cache_ttl_s",
        )


def _check_deadline(request: EngineRequest) -> None:
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise InvalidRequest(
            f"The deadline of the first token is {deadline_s} s: send x-deadline-ms above 0, or leave it out.",
            param="x-deadline-ms",
        )


def _check_reasoning(request: EngineRequest) -> None:
    rule = request.reasoning
    if rule is not None and rule.max_tokens is not None and rule.max_tokens < 0:
        raise InvalidRequest(
            f"The budget of reasoning is {rule.max_tokens} tokens: send 0 or more, or leave it out.",
            param="thinking_token_budget",
        )


def _check_pooling(request: EngineRequest) -> None:
    if request.pooling is None:
        return
    if request.sampling.max_tokens or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "A request for an embedding generates no tokens and no log probabilities: send max_tokens 0, and leave "
            "prompt_logprobs out.",
            param="pooling",
        )


def check_prompt_logprobs(request: EngineRequest) -> None:
    """Raises InvalidRequest if the log probabilities of the prompt would take too much memory."""
    num_top, num_tokens = request.sampling.prompt_logprobs, len(request.prompt_token_ids)
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"Log probabilities of {num_tokens} prompt tokens with {num_top} alternatives each are more than "
            f"{MAX_PROMPT_LOGPROBS} numbers: ask for fewer alternatives, or send a shorter prompt.",
            param="prompt_logprobs",
        )


def check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    """Raises InvalidRequest if a token id of the request is outside the vocabulary of `vocab_size` tokens.

    The error names the field of the request.
    """
    sampling = request.sampling
    named: Mapping[str, Iterable[int]] = {
        "prompt": request.prompt_token_ids,
        "emitted_token_ids": request.emitted_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": (token_id for token_id, _ in sampling.logit_bias),
        "reasoning": () if (rule := request.reasoning) is None else (rule.open_token_id, rule.close_token_id),
        "reasoning.gap_token_ids": () if rule is None else rule.gap_token_ids,
    }
    for param, token_ids in named.items():
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            message = f"Token id {outside} is outside the vocabulary of {vocab_size} tokens."
            raise InvalidRequest(message, param=param)
