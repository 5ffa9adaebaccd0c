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
from typing import Protocol

from graftwork.engine.batch import SampleSpec, SequenceSlice, StepPlan, StepResult
from graftwork.engine.drafting.speculator import Speculator, matching, no_drafts
from graftwork.engine.pace import Pace
from graftwork.engine.pages import PagePool
from graftwork.engine.policy import FairShare
from graftwork.engine.prefix_tree import PrefixMatch, PrefixTree
from graftwork.engine.request import (
    MAX_MIXTURE,
    MAX_MIXTURE_WEIGHT,
    AdapterUse,
    CacheReport,
    EngineEvent,
    EngineRequest,
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


class AdapterResidency(Protocol):
    """Whether an adapter's weights are on the device; pins keep them there."""

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """What each waiting request needs, in their order: loads are begun, room is made and given out."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Whether a request may start with it now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Why adapters cannot serve one request together, as far as they are known by now."""
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...


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
        speculator: Speculator | None = None,
    ) -> None:
        """Without a speculator, a sequence makes one token a step."""
        self._limits = limits
        self._pool = pool
        self._tree = tree
        self._adapters = adapters
        self._scopes = scopes
        self._clock = clock
        self._seeds = seeds
        self._waiting = FairShare(clock)
        self._running: dict[RequestId, Sequence] = {}
        self._by_id: dict[RequestId, Sequence] = {}
        self._pace = Pace(clock)
        self.speculator = speculator or no_drafts(clock)
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

        A sequence whose adapter is still being loaded is passed over; one that lacks pages holds back the rest,
        so that a large request is not starved by small ones.
        """
        outputs: list[Output] = []
        candidates = list(self._waiting.candidates()) if len(self._waiting) else []
        self._adapters.want([digests for one in candidates if (digests := one.request.adapter_digests)])
        for sequence in candidates:
            if len(self._running) >= self._limits.max_running:
                break
            refusal = self._adapters.refusal(sequence.request.adapters)
            if refusal is not None:
                outputs += self._fail([sequence], refusal)
                continue
            if not all(self._adapters.is_ready(digest) for digest in sequence.request.adapter_digests):
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
        """The next step: every sequence that is one token behind, then chunks of those that are further behind.

        Drafts take what is left of the budget, so that nobody's prompt waits for another's guesses.
        """
        budget = self._limits.max_batch_tokens
        turns: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.num_behind > 1):
            if budget == 0:
                break
            num_tokens = min(sequence.num_behind, budget)
            self._grow(sequence, sequence.num_computed + num_tokens)
            turns.append((sequence, num_tokens))
            budget -= num_tokens
        making = [sequence for sequence, num_tokens in turns if num_tokens == sequence.num_behind]
        drafts = self.speculator.draft(making, budget)
        slices = [self._slice(*turn, drafts.get(turn[0].request_id, ())) for turn in turns]
        if not slices:
            return None
        plan = StepPlan(tuple(slices))
        self.speculator.step_begins(plan)
        return plan

    def _slice(self, sequence: Sequence, num_tokens: int, drafted: tuple[int, ...]) -> SequenceSlice:
        start, known_end = sequence.num_computed, sequence.num_computed + num_tokens
        drafted = self._within_memory(sequence, drafted)
        is_last = known_end == len(sequence.token_ids)
        return SequenceSlice(
            request_id=sequence.request_id,
            token_ids=(*sequence.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(sequence.pages[: pages_for(known_end + len(drafted), self._limits.page_tokens)]),
            adapters=sequence.request.adapters,
            samples=self._sample_specs(sequence, drafted) if is_last else (),
        )

    def _within_memory(self, sequence: Sequence, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Give a draft the pages that it needs, and cut it to what can be had without taking any from others."""
        size, known = self._limits.page_tokens, len(sequence.token_ids)
        missing = pages_for(known + len(drafted), size) - len(sequence.pages)
        to_be_had = self._pool.free_pages + self._pool.idle_pages
        if missing > to_be_had:
            drafted = drafted[: (len(sequence.pages) + to_be_had) * size - known]
        if drafted:
            self._grow(sequence, known + len(drafted))
        return drafted

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        missing = pages_for(num_tokens, self._limits.page_tokens) - len(sequence.pages)
        if missing <= 0:
            return
        self._tree.reclaim(missing - self._pool.free_pages)
        sequence.pages += self._pool.take(missing)

    def _sample_specs(self, sequence: Sequence, drafted: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """For the token after the last known one, and for those after each drafted one, should it come true."""
        return tuple(self._sample_spec(sequence, drafted[:count]) for count in range(len(drafted) + 1))

    def _sample_spec(self, sequence: Sequence, drafted: tuple[int, ...]) -> SampleSpec:
        return SampleSpec(
            params=sequence.request.sampling,
            seed=sequence.seed,
            position=len(sequence.token_ids) + len(drafted),
            banned_token_ids=sequence.banned_token_ids(len(drafted)),
        )

    # ---- absorb -----------------------------------------------------------------------------------------------

    def absorb(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's tokens in, and end the sequences that are complete."""
        self.speculator.step_ended()
        outputs: list[Output] = []
        for piece in plan.slices:
            sequence = self._running[piece.request_id]
            sequence.num_computed = piece.known_end
            if piece.samples:
                outputs.extend(self._append(sequence, piece, result.token_ids[piece.request_id]))
        self.counters.steps += 1
        self.counters.max_adapters_in_a_step = max(self.counters.max_adapters_in_a_step, plan.num_adapters)
        return outputs

    def _append(self, sequence: Sequence, piece: SequenceSlice, choices: tuple[int, ...]) -> list[Output]:
        """Add the choices that stand. All but the last were drafted and have their KV; of it nothing is computed."""
        token_ids = sequence.take(matching(piece.draft_token_ids, choices))
        sequence.num_computed = len(sequence.token_ids) - 1
        self.counters.generated_tokens += len(token_ids)
        self._waiting.charge_output(sequence, len(token_ids))
        self.speculator.learn(sequence, piece.num_drafts, len(token_ids))
        outputs = [Output(sequence.request_id, TokensGenerated(token_ids))]
        reason = sequence.finish_reason()
        if reason is not None:
            report = self.speculator.ended(sequence)
            outputs.append(Output(sequence.request_id, RequestFinished(reason, sequence.num_generated, report)))
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
        self.speculator.check_integrity()


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
