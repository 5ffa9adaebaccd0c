"""Chooses the draft tokens of each step for all requests, and learns from which of them were accepted.

Owns what requests share: acceptance rates, the cost of a step's rows, and the cache of earlier answers.
Never changes an answer: a draft token is accepted only if the step samples the same token.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graftwork.engine.core.events import DraftReport
from graftwork.engine.core.step import StepPlan
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.speculative.draft import DraftConstraint, Drafter
from graftwork.engine.speculative.draft_budget import DraftBackoff, StepCost, budget_drafts
from graftwork.engine.speculative.lookup import NGRAM_LENGTHS, AnswerCache, AnswerLookup, PromptLookup
from graftwork.engine.speculative.prediction import PredictionFollower
from graftwork.engine.speculative.request_drafts import NO_DRAFT, AcceptanceRates, DraftCounts, RequestDrafts
from graftwork.platform.clock import Clock
from graftwork.platform.ids import RequestId

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The limits of drafting. If `max_draft_tokens` is 0, nothing is drafted."""

    max_draft_tokens: int = 0
    """The most draft tokens of one request in one step."""
    cache_bytes: int = 0
    """The most bytes of earlier answers, over all scopes."""


def accepted_prefix(draft_token_ids: TokenIds, sampled: TokenIds) -> TokenIds:
    """Returns the valid sampled tokens: all up to and including the first that differs from the draft.

    sampled[i] was sampled after draft_token_ids[:i], so it is the token that decoding without drafts would give.
    """
    for count, (drafted, token) in enumerate(zip(draft_token_ids, sampled, strict=False), start=1):
        if drafted != token:
            return sampled[:count]
    return sampled


class Speculator:
    """Drafts for all requests. The scheduler calls it twice a step. Only the scheduler's thread may use it."""

    def __init__(
        self,
        limits: DraftLimits,
        clock: Clock,
        constraint_of: Callable[[RequestState], DraftConstraint | None] = lambda state: None,
    ) -> None:
        """`constraint_of` returns the limits that a request's grammar sets for its drafts; None without a grammar."""
        self._limits = limits
        self._clock = clock
        self._constraint_of = constraint_of
        self._rates = AcceptanceRates()
        self.cost = StepCost()
        """The seconds of a step by its number of rows, learned from every step."""
        self._backoff = DraftBackoff()
        self._cache = AnswerCache(limits.cache_bytes)
        self._step: tuple[int, float] | None = None
        """Rows and start time of the step that runs."""
        self.counts = DraftCounts()

    def draft(self, states: list[RequestState], spare_rows: int) -> dict[RequestId, TokenIds]:
        """Returns the draft tokens of a step by request, at most `spare_rows` in all.

        `states` are the requests that generate a token in this step. Requests without a draft are left out of the
        result.
        """
        if not states or not self._limits.max_draft_tokens:
            return {}
        if not self._backoff.should_draft(len(states)) and not any(map(_brings_a_prediction, states)):
            return {}
        began_at = self._clock.monotonic()
        asked = [(state, self._drafts_of(state)) for state in states]
        most = self._limits.max_draft_tokens
        survivals = [drafts.propose(min(most, state.max_draft_tokens())) for state, drafts in asked]
        budget = budget_drafts(survivals, self.cost.seconds, spare_rows)
        took = self._clock.monotonic() - began_at
        self._backoff.record(len(states), budget.gain, took / self.cost.seconds(len(states)))
        return {
            state.request_id: drafts.draft.first(length).token_ids
            for (state, drafts), length in zip(asked, budget.lengths, strict=True)
            if length
        }

    def learn(self, state: RequestState, num_verified: int, num_taken: int) -> None:
        """Records that a step verified `num_verified` draft tokens of a request and appended `num_taken` tokens."""
        if state.drafts is not None and state.drafts.draft is not NO_DRAFT:
            self.counts.add(state.drafts.learn(num_verified, num_taken))

    def finish(self, state: RequestState) -> DraftReport:
        """Keeps the answer of a finished request, so that later requests of its scope can draft from it.

        Returns the request's totals of draft tokens.
        """
        if state.drafts is None:
            return DraftReport()
        start = max(state.num_prompt - NGRAM_LENGTHS[0], 0)  # includes the last tokens of the prompt
        self._cache.remember(state.scope.own, state.request.adapter_digests, state.token_ids[start:])
        return state.drafts.report()

    def forget_adapter(self, digest: str) -> None:
        """Drops the answers that were generated under this adapter."""
        self._cache.forget_adapter(digest)

    def _drafts_of(self, state: RequestState) -> RequestDrafts:
        if state.drafts is None:
            state.drafts = self._begin(state)
        state.drafts.constraint = self._constraint_of(state)  # after a preemption it is a new object
        return state.drafts

    def _begin(self, state: RequestState) -> RequestDrafts:
        token_ids, expected = state.token_ids, state.request.prediction_token_ids
        prediction = PredictionFollower(token_ids, expected) if expected else None
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
        """Starts to time a step.

        A step with a prompt chunk is not timed, because its duration does not show what a row costs.
        """
        is_typical = all(piece.known_end - piece.start == 1 for piece in plan.slices)
        self._step = (plan.num_tokens, self._clock.monotonic()) if is_typical else None

    def step_ended(self) -> None:
        """Records the duration of the step, if it was timed."""
        if self._step is not None:
            num_rows, began_at = self._step
            self.cost.record(num_rows, self._clock.monotonic() - began_at)
        self._step = None

    def check_integrity(self) -> None:
        """Asserts that the answer cache is within its bound."""
        self._cache.check_integrity()


def _brings_a_prediction(state: RequestState) -> bool:
    """Returns whether a request is new and its client sent a prediction of the answer."""
    return state.drafts is None and bool(state.request.prediction_token_ids)


def no_drafts(clock: Clock) -> Speculator:
    """Returns a speculator that drafts nothing."""
    return Speculator(DraftLimits(), clock)
