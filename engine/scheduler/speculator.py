"""Chooses the draft tokens of each step for all requests, and learns which drafts were accepted.

Owns what requests share: the acceptance rates, the estimated duration of a step by its number of rows (the tokens that
the step computes), and the cache of earlier answers.
Never changes an answer: a draft token is accepted only if the step samples the same token.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from graftwork.engine.core.events import DraftReport
from graftwork.engine.core.step import StepPlan
from graftwork.engine.core.step_timer import StepTimer
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.speculative.draft import DraftConstraint, Drafter
from graftwork.engine.speculative.draft_budget import DraftBackoff, DraftBudget, StepCost, budget_drafts
from graftwork.engine.speculative.draft_model import DraftContext, DraftModel
from graftwork.engine.speculative.lookup import NGRAM_LENGTHS, AnswerCache, AnswerLookup, PromptLookup
from graftwork.engine.speculative.model_drafter import DraftTask, ModelDrafter
from graftwork.engine.speculative.prediction import PredictionFollower
from graftwork.engine.speculative.request_drafts import NO_DRAFT, AcceptanceRates, DraftCounts, RequestDrafts
from graftwork.engine.step_recorder import NO_RECORDER, StepRecorder
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain, RequestId

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How many draft tokens and how much memory speculative decoding may use. If `max_draft_tokens` is 0, nothing is
    drafted.
    """

    max_draft_tokens: int = 0
    """The most draft tokens of one request in one step."""
    cache_bytes: int = 0
    """The most bytes of memory for earlier answers from which tokens are drafted, over all cache scopes."""
    looks_up: bool = True
    """Whether tokens are drafted from texts and predictions."""


def accepted_prefix(draft_token_ids: TokenIds, sampled: TokenIds) -> TokenIds:
    """Returns the sampled tokens that are valid: all up to and including the first that differs from the draft.

    A sampled token follows the draft tokens before it. So it is valid only if all these draft tokens were sampled too.
    """
    for count, (drafted, token) in enumerate(zip(draft_token_ids, sampled, strict=False), start=1):
        if drafted != token:
            return sampled[:count]
    return sampled


class Speculator:
    """Drafts tokens for all requests, and learns from the results of steps. Only the scheduler's thread may use it."""

    def __init__(
        self,
        limits: DraftLimits,
        clock: Clock,
        constraint_of: Callable[[RequestState], DraftConstraint | None] = lambda state: None,
        recorder: StepRecorder = NO_RECORDER,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`constraint_of` returns the limits that a request's grammar sets for its drafts; None without a grammar.
        `recorder` is told how long the drafts of traced requests took. Without `draft_model`, drafts come from text alone.
        """
        self._limits = limits
        self._clock = clock
        self._constraint_of = constraint_of
        self._recorder = recorder
        self._rates = AcceptanceRates()
        self.cost = StepCost()
        """Estimates the duration of a step from its number of rows (the tokens that it computes)."""
        self._backoff = DraftBackoff()
        self.model_drafter = None if draft_model is None else ModelDrafter(draft_model, clock, self.cost)
        """Drafts with the draft model; None without one."""
        self._cache = AnswerCache(limits.cache_bytes)
        self._timer = StepTimer(clock)
        self._step_rows: deque[int | None] = deque()
        """The number of rows of each step that has not ended, the oldest first; None if nothing is learned from it."""
        self.counts = DraftCounts()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the earlier answers from which tokens are drafted."""
        return self._cache.num_bytes

    def draft(
        self, states: list[RequestState], spare_rows: int, *, only_certain: bool = False
    ) -> dict[RequestId, TokenIds]:
        """Returns the draft tokens that the next step verifies for each request, at most `spare_rows` tokens in all. With
        `only_certain`, only those that are nearly certain to be accepted.

        `states` are the requests that generate a token in this step. The result leaves out requests without a draft.
        Nothing is drafted after a token in flight, because drafts are chosen by the tokens before them.
        """
        known = [state for state in states if not state.num_tokens_in_flight]
        if not states or not self._limits.max_draft_tokens:
            return {}
        looks_up = self._backoff.should_draft(len(states)) or any(map(_brings_a_prediction, states))
        model = self.model_drafter
        guesses = model is not None and model.should_draft(len(states)) and not only_certain
        if not known or not (looks_up or guesses):
            return {}
        began_at = self._clock.monotonic()
        tasks = [self._task(state, looks_up=looks_up) for state in known]
        budget = self._budget(tasks, spare_rows, only_certain=only_certain)
        if looks_up:
            took = self._clock.monotonic() - began_at
            self._backoff.record(len(states), budget.gain, took / self.cost.seconds(len(states)))
        if model is not None and guesses:
            spent = model.draft(tasks, budget)
            budget = self._budget(tasks, spare_rows, spent) if spent is not None else budget
        return {
            state.request_id: task.drafts.draft.first(length).token_ids
            for state, task, length in zip(known, tasks, budget.lengths, strict=True)
            if length
        }

    def _task(self, state: RequestState, *, looks_up: bool) -> DraftTask:
        drafts, most = self._drafts_of(state), min(self._limits.max_draft_tokens, state.max_draft_tokens())
        drafts.draft = drafts.forced = NO_DRAFT
        chances = self._propose(state, drafts, most) if looks_up else []
        context = DraftContext(state.request_id, state.token_ids, (), state.request.sampling, state.seed)
        return DraftTask(context, drafts, most if state.request.uses_lookups else 0, chances)

    def _budget(
        self, tasks: list[DraftTask], spare_rows: int, spent: float = 0.0, *, only_certain: bool = False
    ) -> DraftBudget:
        """Returns how many tokens of each draft the step verifies, after `spent` seconds for the drafts."""
        survivals = [task.chances for task in tasks]
        return budget_drafts(
            survivals, lambda rows: self.cost.seconds(rows) + spent, spare_rows, only_certain=only_certain
        )

    def _propose(self, state: RequestState, drafts: RequestDrafts, most: int) -> list[float]:
        if not state.request.traced:
            return drafts.propose(most)
        began_at = self._clock.monotonic()
        found = drafts.propose(most)
        self._recorder.drafted(state.request_id, self._clock.monotonic() - began_at)
        return found

    def may_draft(self, num_requests: int) -> bool:
        """Returns whether the next step, if it generates tokens for `num_requests` requests, would verify drafts if there
        are any.
        """
        if not num_requests or not self._limits.max_draft_tokens:
            return False
        return not self._backoff.pauses(num_requests) or (
            self.model_drafter is not None and not self.model_drafter.pauses(num_requests)
        )

    def learn(self, state: RequestState, num_verified: int, num_taken: int) -> None:
        """Learns from the result of a step, which verified `num_verified` draft tokens of the request.

        The request has got `num_taken` new tokens from this step.
        """
        if self.model_drafter is not None and num_taken:
            self.model_drafter.learn(state.request_id, state.token_ids[-num_taken:])
        if state.drafts is not None and state.drafts.draft is not NO_DRAFT:
            self.counts.add(state.drafts.learn(num_verified, num_taken))

    def leave_batch(self, request_id: RequestId) -> None:
        """Drops the KV that the draft model keeps of a request which has ended or was preempted."""
        if self.model_drafter is not None:
            self.model_drafter.forget(request_id)

    def finish(self, state: RequestState) -> DraftReport:
        """Keeps the answer of a finished request, so that later requests of the same domain (tenant) and adapters can
        draft from it.

        Returns how many draft tokens of the request were verified and accepted in all.
        """
        if state.drafts is None:
            return DraftReport()
        start = max(state.num_prompt - NGRAM_LENGTHS[0], 0)  # includes the last tokens of the prompt
        request = state.request
        self._cache.remember(state.scope.own, request.domain, request.adapter_digests, state.token_ids[start:])
        return state.drafts.report()

    def forget_adapter(self, digest: str) -> None:
        """Drops the cached answers that were generated with the adapter `digest`, so that nothing is drafted from them."""
        self._cache.forget_adapter(digest)

    def forget_domain(self, domain: IsolationDomain) -> None:
        """Drops the cached answers of a domain (usually one tenant)."""
        self._cache.forget_domain(domain)

    def _drafts_of(self, state: RequestState) -> RequestDrafts:
        if state.drafts is None:
            state.drafts = self._begin(state)
        state.drafts.constraint = self._constraint_of(state)  # after a preemption it is a new object
        return state.drafts

    def _begin(self, state: RequestState) -> RequestDrafts:
        token_ids, expected = state.token_ids, state.request.prediction_token_ids
        if not (state.request.uses_lookups and self._limits.looks_up):
            return RequestDrafts(token_ids, state.stop_token_ids, AcceptanceRates(self._rates), lookups=())
        prediction = PredictionFollower(token_ids, expected, state.num_prompt) if expected else None
        lookups: list[Drafter] = [] if prediction is None else [prediction]
        lookups += [PromptLookup(token_ids), AnswerLookup(token_ids, state.scope.own, self._cache)]
        return RequestDrafts(
            token_ids,
            state.stop_token_ids,
            AcceptanceRates(self._rates),
            lookups=tuple(lookups),
            prediction=prediction,
        )

    # ---- the cost of steps ------------------------------------------------------------------------------------

    def step_begins(self, plan: StepPlan) -> None:
        """Starts to measure the duration of a step. Each step must be ended by `step_ended`, in the same order.

        Nothing is learned from a step with a chunk of a prompt, because its duration does not show how much longer a
        step takes with one more decoding request.
        """
        is_typical = all(piece.known_end - piece.start == 1 for piece in plan.slices)
        self._step_rows.append(plan.num_tokens if is_typical else None)
        self._timer.begin()

    def step_ended(self) -> None:
        """Learns the duration of the oldest step that has not ended."""
        seconds, num_rows = self._timer.end(), self._step_rows.popleft()
        if num_rows is not None:
            self.cost.record(num_rows, seconds)

    def check_integrity(self) -> None:
        """Checks that the cache of earlier answers is within its limit in bytes, and the memory of the draft model."""
        self._cache.check_integrity()
        if self.model_drafter is not None:
            self.model_drafter.check_integrity()


def _brings_a_prediction(state: RequestState) -> bool:
    """Returns whether a request is new and its client sent a prediction of the answer."""
    return state.drafts is None and bool(state.request.prediction_token_ids)


def no_drafts(clock: Clock) -> Speculator:
    """Returns a Speculator for an engine without speculative decoding: it never drafts a token."""
    return Speculator(DraftLimits(), clock)
