"""Which guesses the next step verifies, over all sequences; what is learned from the last one.

The Speculator owns what sequences share: the record of how often guesses come true, the cost of a step's rows, the cache
of earlier answers. The scheduler consults it twice a step; it never changes a sequence, and never an answer: what a
step takes is what it sampled, and drafts only let it sample several tokens at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graftwork.engine.batch import StepPlan
from graftwork.engine.drafting.acceptance import AcceptanceRates
from graftwork.engine.drafting.allotment import allot
from graftwork.engine.drafting.answer_cache import AnswerCache, CacheLookup
from graftwork.engine.drafting.draft import DraftConstraint, Drafter
from graftwork.engine.drafting.effort import Effort
from graftwork.engine.drafting.prediction import PredictionFollower
from graftwork.engine.drafting.sequence_drafts import NOTHING, DraftCounts, SequenceDrafts
from graftwork.engine.drafting.session_lookup import SessionLookup
from graftwork.engine.drafting.step_cost import StepCost
from graftwork.engine.drafting.suffix_index import NGRAM_LENGTHS
from graftwork.engine.request import DraftReport
from graftwork.engine.sequence import Sequence
from graftwork.platform.clock import Clock
from graftwork.platform.ids import RequestId

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Sizes; no drafts at all with `max_draft_tokens` 0."""

    max_draft_tokens: int = 0
    """Of one sequence in one step."""
    cache_bytes: int = 0
    """Of earlier answers, over all scopes."""


def matching(draft_token_ids: TokenIds, choices: TokenIds) -> TokenIds:
    """The choices that stand: all up to the first that is not what was drafted, and that one, too.

    choices[i] was sampled behind draft_token_ids[:i], so it is what one token a step would have given there.
    """
    for number, (guess, choice) in enumerate(zip(draft_token_ids, choices, strict=False), start=1):
        if guess != choice:
            return choices[:number]
    return choices


class Speculator:
    """Owned by the scheduler."""

    def __init__(
        self,
        limits: DraftLimits,
        clock: Clock,
        constraint_of: Callable[[Sequence], DraftConstraint | None] = lambda sequence: None,
    ) -> None:
        """`constraint_of` tells what a sequence may say at all, where it is constrained."""
        self._limits = limits
        self._clock = clock
        self._constraint_of = constraint_of
        self._rates = AcceptanceRates()
        self.cost = StepCost()
        """What a step of so many rows takes; learned from every step."""
        self._effort = Effort()
        self._cache = AnswerCache(limits.cache_bytes)
        self._step: tuple[int, float] | None = None
        self.counts = DraftCounts()

    def draft(self, sequences: list[Sequence], spare_rows: int) -> dict[RequestId, TokenIds]:
        """What is guessed for sequences that each make a token in the next step, which has room for `spare_rows`.

        Who is not named gets nothing.
        """
        if not sequences or not self._limits.max_draft_tokens:
            return {}
        if not self._effort.is_called_for(len(sequences)) and not any(map(_brings_a_prediction, sequences)):
            return {}
        began_at = self._clock.monotonic()
        asked = [(sequence, self._drafts_of(sequence)) for sequence in sequences]
        most = self._limits.max_draft_tokens
        survivals = [drafts.propose(min(most, sequence.max_draft_tokens())) for sequence, drafts in asked]
        allotment = allot(survivals, self.cost.seconds, spare_rows)
        took = self._clock.monotonic() - began_at
        self._effort.record(len(sequences), allotment.gain, took / self.cost.seconds(len(sequences)))
        return {
            sequence.request_id: drafts.guess.first(length).token_ids
            for (sequence, drafts), length in zip(asked, allotment.lengths, strict=True)
            if length
        }

    def learn(self, sequence: Sequence, num_verified: int, num_taken: int) -> None:
        """A step has verified so many drafted tokens of a sequence, and added so many tokens to it."""
        if sequence.drafts is not None and sequence.drafts.guess is not NOTHING:
            self.counts.add(sequence.drafts.learn(num_verified, num_taken))

    def ended(self, sequence: Sequence) -> DraftReport:
        """A sequence has ended well: later ones of its scope may guess from its answer."""
        if sequence.drafts is None:
            return DraftReport()
        led_to_by = max(sequence.num_prompt - NGRAM_LENGTHS[0], 0)
        digests = sequence.request.adapter_digests
        self._cache.remember(sequence.scope.own, digests, sequence.token_ids[led_to_by:])
        return sequence.drafts.report()

    def forget_adapter(self, digest: str) -> None:
        """Nothing of what was said under this adapter is guessed from any more."""
        self._cache.forget_adapter(digest)

    def _drafts_of(self, sequence: Sequence) -> SequenceDrafts:
        if sequence.drafts is None:
            sequence.drafts = self._begin(sequence)
        sequence.drafts.constraint = self._constraint_of(sequence)  # another one where it has been offloaded since
        return sequence.drafts

    def _begin(self, sequence: Sequence) -> SequenceDrafts:
        token_ids, expected = sequence.token_ids, sequence.request.prediction_token_ids
        prediction = PredictionFollower(token_ids, expected) if expected else None
        lookups: list[Drafter] = [] if prediction is None else [prediction]
        lookups += [SessionLookup(token_ids), CacheLookup(token_ids, sequence.scope.own, self._cache)]
        return SequenceDrafts(
            token_ids,
            sequence.stop_token_ids,
            AcceptanceRates(self._rates),
            lookups=tuple(lookups),
            prediction=prediction,
        )

    # ---- the cost of steps ------------------------------------------------------------------------------------

    def step_begins(self, plan: StepPlan) -> None:
        """A step is about to run; one with a chunk of a prompt teaches nothing of what a row costs."""
        is_typical = all(piece.known_end - piece.start == 1 for piece in plan.slices)
        self._step = (plan.num_tokens, self._clock.monotonic()) if is_typical else None

    def step_ended(self) -> None:
        """Its result is there."""
        if self._step is not None:
            num_rows, began_at = self._step
            self.cost.record(num_rows, self._clock.monotonic() - began_at)
        self._step = None

    def check_integrity(self) -> None:
        """The cache keeps its bound."""
        self._cache.check_integrity()


def _brings_a_prediction(sequence: Sequence) -> bool:
    """Whether it is new, and its client has said what to guess."""
    return sequence.drafts is None and bool(sequence.request.prediction_token_ids)


def no_drafts(clock: Clock) -> Speculator:
    """For an engine that makes one token a step."""
    return Speculator(DraftLimits(), clock)
