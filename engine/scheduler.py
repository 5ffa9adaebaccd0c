"""Who is served in the next step, and what came of the last one.

The Scheduler owns every Sequence. Its four verbs are admit, plan, absorb and cancel; it is pure Python, without torch.
There is no prefill mode and no decode mode: a sequence catches up with the tokens that are known of it.

It keeps one promise: a running sequence always finds its next page. Admission counts the pages that a sequence may
need at worst against those that are free or idle, so that what runs can run to its end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from graftwork.engine.adapter_residency import AdapterResidency
from graftwork.engine.batch import SampleSpec, SequenceSlice, StepPlan, StepResult
from graftwork.engine.grammar.residency import GrammarResidency, NoGrammars
from graftwork.engine.pace import Pace
from graftwork.engine.pages import PagePool
from graftwork.engine.policy import FairShare
from graftwork.engine.prefix_tree import PrefixMatch, PrefixTree
from graftwork.engine.request import (
    MAX_MIXTURE,
    MAX_MIXTURE_WEIGHT,
    CacheReport,
    EngineEvent,
    EngineRequest,
    FinishReason,
    MissReason,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.scope import ScopeMaker
from graftwork.engine.sequence import Sequence, pages_for
from graftwork.platform.clock import Clock
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    GraftworkError,
    InvalidRequest,
)
from graftwork.platform.ids import RequestId

_NO_GRAMMARS = NoGrammars()


@dataclass(frozen=True, slots=True)
class Output:
    """What one request is to be told: an event, or the error that ended it."""

    request_id: RequestId
    event: EngineEvent | GraftworkError

    @property
    def is_last(self) -> bool:
        return isinstance(self.event, RequestFinished | GraftworkError)


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


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    max_adapters_in_a_step: int = 0


class Scheduler:
    """Continuous batching with chunked prefill under a token budget."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        tree: PrefixTree,
        adapters: AdapterResidency,
        scopes: ScopeMaker,
        *,
        clock: Clock,
        seeds: Random,
        grammars: GrammarResidency = _NO_GRAMMARS,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._tree = tree
        self._adapters = adapters
        self._grammars = grammars
        self._scopes = scopes
        self._clock = clock
        self._seeds = seeds
        self._waiting = FairShare(clock)
        self._running: dict[RequestId, Sequence] = {}
        self._by_id: dict[RequestId, Sequence] = {}
        self._pace = Pace(clock)
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running_adapters(self) -> set[str]:
        return _adapters_of(self._running.values())

    def waiting_adapters(self) -> set[str]:
        return _adapters_of(self._waiting)

    # ---- submit and cancel ------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises a typed error, and changes nothing, if it cannot be served."""
        self._validate(request)
        free_places = self._limits.max_running - len(self._running)
        if len(self._waiting) >= self._limits.max_waiting + free_places:
            raise CapacityContended(
                f"The queue is full: {self._limits.max_waiting} requests are waiting. Try again later.",
                retry_after_s=self._pace.seconds_until_room(),
            )
        sequence = self._make_sequence(request)
        self._by_id[request.request_id] = sequence
        self._waiting.enqueue(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and free what it held. One that has ended already is not an error: messages cross."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if request_id in self._running:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def fail_waiting_for(self, digest: str, error: GraftworkError) -> list[Output]:
        """End every queued request that needs an adapter that could not be loaded."""
        failed = [sequence for sequence in self._waiting if digest in sequence.request.adapter_digests]
        return self._fail(failed, error)

    def fail_running(self, request_ids: Iterable[RequestId], error: GraftworkError) -> list[Output]:
        """End the requests of a step that could not be carried out; their KV is not kept."""
        return self._fail([self._running[request_id] for request_id in request_ids], error)

    def _fail(self, sequences: list[Sequence], error: GraftworkError) -> list[Output]:
        for sequence in sequences:
            self.cancel(sequence.request_id)
        return [Output(sequence.request_id, error) for sequence in sequences]

    # ---- admit ------------------------------------------------------------------------------------------------

    def admit(self) -> list[Output]:
        """Let waiting sequences in, in the order of the policy, while everything that each needs is there.

        A sequence whose adapter is still being loaded, or whose grammar compiled, is passed over; one that lacks pages holds back the rest,
        so that a large request is not starved by small ones.
        """
        outputs: list[Output] = []
        candidates = list(self._waiting.candidates()) if len(self._waiting) else []
        self._adapters.want([digests for one in candidates if (digests := one.request.adapter_digests)])
        self._grammars.want([one.request for one in candidates if one.request.grammar is not None])
        for sequence in candidates:
            if len(self._running) >= self._limits.max_running:
                break
            refusal = self._adapters.refusal(sequence.request.adapters) or self._grammars.refusal(sequence.request)
            if refusal is not None:
                outputs += self._fail([sequence], refusal)
                continue
            if not all(self._adapters.is_ready(digest) for digest in sequence.request.adapter_digests):
                continue
            if not self._grammars.is_ready(sequence.request):
                continue
            match = self._match(sequence)
            if not self._fits(sequence, match):
                break
            outputs.append(self._start(sequence, match))
        return outputs

    def _match(self, sequence: Sequence) -> PrefixMatch:
        # The last prompt token is always computed: its logits choose the first new one.
        return self._tree.match(sequence.scope, sequence.token_ids[:-1])

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        size = self._limits.page_tokens
        promised = sum(running.pages_still_needed(size) for running in self._running.values())
        taken_from_idle = sum(self._pool.holders(page) == 1 for page in match.pages)
        wanted = sequence.pages_still_needed(size) - len(match.pages) + taken_from_idle
        return promised + wanted <= self._pool.free_pages + self._pool.idle_pages

    def _start(self, sequence: Sequence, match: PrefixMatch) -> Output:
        self._waiting.remove(sequence)
        sequence.pages = self._tree.lease(sequence.scope, sequence.token_ids, match)
        sequence.num_computed = len(sequence.pages) * self._limits.page_tokens
        for digest in sequence.request.adapter_digests:
            self._adapters.pin(digest)
        generated = sequence.token_ids[sequence.num_prompt :]
        self._grammars.open(sequence.request, sequence.stop_token_ids, generated)
        self._running[sequence.request_id] = sequence
        self._waiting.charge_input(sequence, sequence.num_behind)
        self.counters.prompt_tokens += sequence.num_prompt
        self.counters.cached_tokens += sequence.num_computed
        return Output(sequence.request_id, PromptAdmitted(self._cache_report(sequence, match)))

    def _cache_report(self, sequence: Sequence, match: PrefixMatch) -> CacheReport:
        reason = MissReason.EVICTED_PRESSURE if match.was_evicted else None
        if reason is None and not match.pages and sequence.num_prompt > self._limits.page_tokens:
            reason = MissReason.NEVER_CACHED
        return CacheReport(
            device_tokens=sequence.num_computed,
            recomputed_tokens=sequence.num_behind,
            miss_reason=reason,
        )

    # ---- plan -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step: every sequence that is one token behind, then chunks of those that are further behind."""
        budget = self._limits.max_batch_tokens
        slices: list[SequenceSlice] = []
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.num_behind > 1):
            if budget == 0:
                break
            num_tokens = min(sequence.num_behind, budget)
            slices.append(self._slice(sequence, num_tokens))
            budget -= num_tokens
        return StepPlan(tuple(slices)) if slices else None

    def _slice(self, sequence: Sequence, num_tokens: int) -> SequenceSlice:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        self._grow(sequence, end)
        return SequenceSlice(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            pages=tuple(sequence.pages[: pages_for(end, self._limits.page_tokens)]),
            adapters=sequence.request.adapters,
            sample=self._sample_spec(sequence) if end == len(sequence.token_ids) else None,
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        missing = pages_for(num_tokens, self._limits.page_tokens) - len(sequence.pages)
        if missing <= 0:
            return
        self._tree.reclaim(missing - self._pool.free_pages)
        sequence.pages += self._pool.take(missing)

    def _sample_spec(self, sequence: Sequence) -> SampleSpec:
        banned = sequence.banned_token_ids()
        return SampleSpec(
            params=sequence.request.sampling,
            seed=sequence.seed,
            position=len(sequence.token_ids),
            banned_token_ids=banned,
            mask=self._grammars.row(sequence.request_id, banned),
        )

    # ---- absorb -----------------------------------------------------------------------------------------------

    def absorb(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's tokens in, and end the sequences that are complete."""
        outputs: list[Output] = []
        for piece in plan.slices:
            sequence = self._running[piece.request_id]
            sequence.num_computed = piece.end
            if piece.request_id in result.ends:
                outputs.extend(self._end(sequence, result.ends[piece.request_id]))
            elif piece.sample is not None:
                outputs.extend(self._append(sequence, result.token_ids[piece.request_id]))
        self.counters.steps += 1
        self.counters.max_adapters_in_a_step = max(self.counters.max_adapters_in_a_step, plan.num_adapters)
        return outputs

    def _end(self, sequence: Sequence, error: GraftworkError | None) -> list[Output]:
        """A grammar left no token to choose: the answer was complete, or the request has failed."""
        if error is not None:
            return self._fail([sequence], error)
        finished = RequestFinished(FinishReason.STOP, sequence.num_generated)
        self._finish(sequence)
        return [Output(sequence.request_id, finished)]

    def _append(self, sequence: Sequence, token_id: int) -> list[Output]:
        error = self._grammars.accept(sequence.request_id, token_id)
        if error is not None:
            return self._fail([sequence], error)
        sequence.token_ids.append(token_id)
        self.counters.generated_tokens += 1
        self._waiting.charge_output(sequence, 1)
        outputs = [Output(sequence.request_id, TokensGenerated((token_id,)))]
        reason = sequence.finish_reason()
        if reason is not None:
            outputs.append(Output(sequence.request_id, RequestFinished(reason, sequence.num_generated)))
            self._finish(sequence)
        return outputs

    def _finish(self, sequence: Sequence) -> None:
        computed = sequence.token_ids[: sequence.num_computed]
        self._tree.insert(sequence.scope, computed, sequence.pages)
        del self._by_id[sequence.request_id]
        self._release(sequence)
        self._pace.finished_one()

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self._pool.release(sequence.pages)
        sequence.pages = []
        for digest in sequence.request.adapter_digests:
            self._adapters.unpin(digest)
        self._grammars.close(sequence.request_id)

    # ---- requests ---------------------------------------------------------------------------------------------

    def _validate(self, request: EngineRequest) -> None:
        prompt, limits = request.prompt_token_ids, self._limits
        if request.request_id in self._by_id:
            raise Conflict(f"Request {request.request_id} is being served already: give each request its own id.")
        if not prompt:
            raise InvalidRequest("The prompt is empty: send at least one token.", param="prompt")
        if len(prompt) + 1 > limits.context_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens; this model's context is {limits.context_tokens} tokens, the "
                "answer included. Shorten the prompt.",
                param="prompt",
            )
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        _check_mixture(request)
        outside = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"Token id {outside} is outside the vocabulary of {limits.vocab_size} tokens.", param="prompt"
            )

    def _make_sequence(self, request: EngineRequest) -> Sequence:
        request = replace(request, adapters=tuple(sorted(request.adapters)))  # a sum has no order; its cache has
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self._limits.eos_token_ids
        return Sequence(
            request=request,
            scope=self._scopes.scope(request.isolation, request.adapters),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            arrived_at=self._clock.monotonic(),
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
            max_total_tokens=min(len(request.prompt_token_ids) + sampling.max_tokens, self._limits.context_tokens),
            token_ids=list(request.prompt_token_ids),
        )

    def check_integrity(self) -> None:
        """Every page is held by the tree and by the sequences that list it, and by nobody else."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        held = sum(len(sequence.pages) for sequence in self._running.values())
        holders = self._pool.num_holders
        assert held + len(self._tree) == holders, f"{held} + {len(self._tree)} holds expected, {holders} counted"
        assert len(self._by_id) == len(self._running) + len(self._waiting)


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


def _adapters_of(sequences: Iterable[Sequence]) -> set[str]:
    return {digest for sequence in sequences for digest in sequence.request.adapter_digests}
