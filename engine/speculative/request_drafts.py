"""Makes the drafts of one request, and counts how many of their tokens are accepted.

Owns the request's drafters and the draft that the running step verifies. Never changes the request's tokens.
"""

from dataclasses import dataclass, field

from graftwork.engine.core.events import DraftReport
from graftwork.engine.speculative.acceptance import AcceptanceRates
from graftwork.engine.speculative.draft import Draft, DraftConstraint, Drafter, DraftSource, DraftSpan
from graftwork.engine.speculative.prediction import PredictionFollower

NO_DRAFT = Draft()


@dataclass(slots=True)
class DraftCounts:
    """Counts of draft tokens, of one request or of all requests."""

    drafted: int = 0
    """Draft tokens that a step has verified."""
    accepted: int = 0
    """Draft tokens that became part of the answer."""
    forced: int = 0
    """Accepted draft tokens that a grammar dictated."""

    def add(self, other: "DraftCounts") -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.forced += other.forced


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """The drafters of one request, the most trusted first."""

    token_ids: list[int]
    """The request's own list, which grows; read only."""
    stop_token_ids: frozenset[int]
    """The answer ends with one of these, and so does a draft."""
    rates: AcceptanceRates
    lookups: tuple[Drafter, ...]
    prediction: PredictionFollower | None = None
    """The member of `lookups` that follows the client's prediction; None without a prediction."""
    constraint: DraftConstraint | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    draft: Draft = NO_DRAFT
    """The present draft. The next step verifies a prefix of it."""

    def propose(self, max_tokens: int) -> list[float]:
        """Drafts up to `max_tokens` tokens. Returns, for each, the probability that it and all before it are accepted.

        Forced tokens come first. After them comes the draft of the lookup with the most expected accepted tokens.
        """
        for drafter in self.lookups:
            drafter.observe()
        start = self._forced(max_tokens)
        self.draft, best = start, self.rates.survival(start)
        for drafter in self.lookups:
            span = drafter.propose(start.token_ids, max_tokens - len(start)) if len(start) < max_tokens else None
            draft = start if span is None else self._possible(Draft((*start.spans, span)))
            chances = self.rates.survival(draft)
            if sum(chances) > sum(best):
                self.draft, best = draft, chances
        return best

    def _forced(self, max_tokens: int) -> Draft:
        token_ids = () if self.constraint is None else self.constraint.forced_token_ids(max_tokens)
        return Draft((DraftSpan(DraftSource.GRAMMAR, 0, token_ids),)) if token_ids else NO_DRAFT

    def _possible(self, draft: Draft) -> Draft:
        """Cuts a draft after its first stop token, and before the first token that the constraint does not allow."""
        if not self.stop_token_ids.isdisjoint(draft.token_ids):
            ends_at = next(index for index, token in enumerate(draft.token_ids) if token in self.stop_token_ids)
            draft = draft.first(ends_at + 1)
        return draft if self.constraint is None else draft.first(self.constraint.allowed_length(draft.token_ids))

    def learn(self, num_verified: int, num_taken: int) -> DraftCounts:
        """Compares the draft with the last `num_taken` tokens of the request, which a step has just added.

        If no draft token was verified, still compares the first one, to learn whether it was right.
        """
        added = self.token_ids[len(self.token_ids) - num_taken :]
        drafted = [(span, token) for span in self.draft.spans for token in span.token_ids]
        right: list[DraftSpan] = []
        for (span, guess), token in zip(drafted[: max(num_verified, 1)], added, strict=False):
            is_right = guess == token
            self.rates.record(span.source, span.match_length, is_accepted=is_right)
            if not is_right:
                break
            right.append(span)
        accepted = right[:num_verified]
        forced = sum(span.source is DraftSource.GRAMMAR for span in accepted)
        self.draft = NO_DRAFT
        news = DraftCounts(num_verified, len(accepted), forced)
        self.counts.add(news)
        return news

    def report(self) -> DraftReport:
        """Returns the totals, at the end of the request."""
        if self.prediction is not None:
            self.prediction.observe()
        return DraftReport(
            drafted_tokens=self.counts.drafted,
            accepted_tokens=self.counts.accepted,
            forced_tokens=self.counts.forced,
            accepted_prediction_tokens=0 if self.prediction is None else self.prediction.num_matched,
            rejected_prediction_tokens=0 if self.prediction is None else self.prediction.num_unmatched,
        )
