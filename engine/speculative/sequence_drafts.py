"""What one sequence guesses, and what came of its guesses."""

from dataclasses import dataclass, field

from graftwork.engine.core.events import DraftReport
from graftwork.engine.speculative.acceptance import AcceptanceRates
from graftwork.engine.speculative.draft import Draft, DraftConstraint, Drafter, DraftSource, DraftSpan
from graftwork.engine.speculative.prediction import PredictionFollower

NOTHING = Draft()


@dataclass(slots=True)
class DraftCounts:
    """Tokens, over one request or over all."""

    drafted: int = 0
    """Guessed and verified."""
    accepted: int = 0
    """Of these, part of the answer."""
    forced: int = 0
    """Of these, spelled out by a constraint."""

    def add(self, other: "DraftCounts") -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.forced += other.forced


@dataclass(slots=True, eq=False)
class SequenceDrafts:
    """The drafters of one sequence, in the order of trust, and the guess whose answer is awaited."""

    token_ids: list[int]
    """The sequence's own, which grows; read only."""
    stop_token_ids: frozenset[int]
    """Behind one of these there is no answer, and so no guess."""
    rates: AcceptanceRates
    lookups: tuple[Drafter, ...]
    prediction: PredictionFollower | None = None
    """One of the lookups, where the client has predicted the answer."""
    constraint: DraftConstraint | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    guess: Draft = NOTHING

    def propose(self, max_tokens: int) -> list[float]:
        """Guess up to `max_tokens`; returns the chance of each token that it and all before it come true.

        Forced text comes first, and lookup goes on from its end: of the sources that know how to, the one that is
        expected to be right for longest.
        """
        for drafter in self.lookups:
            drafter.observe()
        start = self._forced(max_tokens)
        self.guess, best = start, self.rates.survival(start)
        for drafter in self.lookups:
            span = drafter.propose(start.token_ids, max_tokens - len(start)) if len(start) < max_tokens else None
            draft = start if span is None else self._possible(Draft((*start.spans, span)))
            chances = self.rates.survival(draft)
            if sum(chances) > sum(best):
                self.guess, best = draft, chances
        return best

    def _forced(self, max_tokens: int) -> Draft:
        token_ids = () if self.constraint is None else self.constraint.forced_token_ids(max_tokens)
        return Draft((DraftSpan(DraftSource.GRAMMAR, 0, token_ids),)) if token_ids else NOTHING

    def _possible(self, draft: Draft) -> Draft:
        """Up to the end of the answer, if the draft has it, and as far as the constraint allows."""
        if not self.stop_token_ids.isdisjoint(draft.token_ids):
            ends_at = next(index for index, token in enumerate(draft.token_ids) if token in self.stop_token_ids)
            draft = draft.first(ends_at + 1)
        return draft if self.constraint is None else draft.first(self.constraint.allowed_length(draft.token_ids))

    def learn(self, num_verified: int, num_taken: int) -> DraftCounts:
        """Score the guess by the last `num_taken` tokens of the sequence, which a step has just added.

        The first guess is scored even where nothing was verified: the step's own choice tells whether it was right.
        """
        came = self.token_ids[len(self.token_ids) - num_taken :]
        guessed = [(span, guess) for span in self.guess.spans for guess in span.token_ids]
        right: list[DraftSpan] = []
        for (span, guess), token in zip(guessed[: max(num_verified, 1)], came, strict=False):
            is_right = guess == token
            self.rates.record(span.source, span.match_length, came_true=is_right)
            if not is_right:
                break
            right.append(span)
        accepted = right[:num_verified]
        forced = sum(span.source is DraftSource.GRAMMAR for span in accepted)
        self.guess = NOTHING
        news = DraftCounts(num_verified, len(accepted), forced)
        self.counts.add(news)
        return news

    def report(self) -> DraftReport:
        """What is told of it at the sequence's end."""
        if self.prediction is not None:
            self.prediction.observe()
        return DraftReport(
            drafted_tokens=self.counts.drafted,
            accepted_tokens=self.counts.accepted,
            forced_tokens=self.counts.forced,
            accepted_prediction_tokens=0 if self.prediction is None else self.prediction.num_matched,
            rejected_prediction_tokens=0 if self.prediction is None else self.prediction.num_unmatched,
        )
