"""Makes the drafts (guessed next tokens) of one request, and estimates how often draft tokens are accepted.

Owns the request's drafters, the draft that the running step verifies, and the acceptance rates. There is one rate for
each source of draft tokens and each range of evidence (see DraftSpan). Never changes the request's tokens.

Each rate is a running average. The engine's rates start from rough guesses, and a request's rates start from the
engine's rates. So a request whose drafts fail soon drafts less, and a request that starts to quote a tool result soon
drafts more.

A span is consecutive draft tokens from one source. All its tokens use the evidence at its start.
"""

from dataclasses import dataclass, field

from graftwork.engine.core.events import DraftReport
from graftwork.engine.speculative.draft import Draft, DraftConstraint, Drafter, DraftSource, DraftSpan
from graftwork.engine.speculative.prediction import PredictionFollower

_LAST_BUCKET = 6


_PRIORS: dict[DraftSource, tuple[float, ...]] = {
    DraftSource.GRAMMAR: (0.95,) * 7,
    DraftSource.PREDICTION: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95),
    DraftSource.SESSION: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
    DraftSource.CACHE: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
    DraftSource.MODEL: (0.3, 0.5, 0.65, 0.8, 0.9, 0.93, 0.97),
}
"""The acceptance rates before any observation, by bucket of evidence: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 and
more.
"""


_ENGINE_MEMORY = 400


_REQUEST_MEMORY = 32
"""An average covers about this many draft tokens. Older ones lose weight."""


_PRIOR_WEIGHT = 8
"""An inherited rate weighs as much as this many draft tokens."""


class AcceptanceRates:
    """Measures how often draft tokens are accepted. Each rate is a running average.

    There is one rate for each source of draft tokens and each range of evidence (see DraftSpan).
    """

    def __init__(self, inherited: "AcceptanceRates | None" = None) -> None:
        self._inherited = inherited
        self._rates: dict[DraftSource, list[float]] = {
            source: list(priors if inherited is None else inherited._rates[source])
            for source, priors in _PRIORS.items()
        }
        self._counts = {name: [_PRIOR_WEIGHT] * (_LAST_BUCKET + 1) for name in _PRIORS}
        self._memory = _ENGINE_MEMORY if inherited is None else _REQUEST_MEMORY

    def rate(self, source: DraftSource, evidence: int) -> float:
        """Returns the probability that a draft token is accepted if all draft tokens before it were accepted.

        `source` and `evidence` are those of its span.
        """
        return self._rates[source][_bucket(evidence)]

    def survival(self, draft: Draft) -> list[float]:
        """Returns one probability for each token of a draft: that this token and all draft tokens before it are
        accepted.
        """
        chances: list[float] = []
        chance = 1.0
        for span in draft.spans:
            rate = self.rate(span.source, span.evidence)
            for _ in span.token_ids:
                chance *= rate
                chances.append(chance)
        return chances

    def record(self, source: DraftSource, evidence: int, *, is_accepted: bool) -> None:
        """Records whether one verified draft token was accepted.

        The rates of a request also pass this on to the rates of the engine.
        """
        bucket = _bucket(evidence)
        counts, rates = self._counts[source], self._rates[source]
        counts[bucket] = min(counts[bucket] + 1, self._memory)
        rates[bucket] += (is_accepted - rates[bucket]) / counts[bucket]
        if self._inherited is not None:
            self._inherited.record(source, evidence, is_accepted=is_accepted)


def _bucket(evidence: int) -> int:
    return min(evidence.bit_length(), _LAST_BUCKET)


NO_DRAFT = Draft()


@dataclass(slots=True)
class DraftCounts:
    """How many draft tokens were verified and accepted, for one request or for all requests."""

    drafted: int = 0
    """The number of draft tokens that steps have verified."""
    accepted: int = 0
    """The number of draft tokens that became part of the answer."""
    forced: int = 0
    """The number of accepted draft tokens that a grammar forced."""
    model_drafted: int = 0
    """The number of verified draft tokens that a draft model guessed."""
    model_accepted: int = 0
    """The number of accepted draft tokens that a draft model guessed."""

    @property
    def model_rejected(self) -> int:
        """The number of verified draft tokens that a draft model guessed and that did not become part of an answer."""
        return self.model_drafted - self.model_accepted

    def add(self, other: "DraftCounts") -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.forced += other.forced
        self.model_drafted += other.model_drafted
        self.model_accepted += other.model_accepted


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """Makes the drafts (guessed next tokens) of one request.

    `lookups` are the drafters that guess tokens, the most trusted one first.
    """

    token_ids: list[int]
    """The request's own list of tokens. The list grows, and is only read here."""
    stop_token_ids: frozenset[int]
    """The tokens that end the answer. A draft ends after the first of them."""
    rates: AcceptanceRates
    lookups: tuple[Drafter, ...]
    prediction: PredictionFollower | None = None
    """The drafter in `lookups` that drafts from the client's prediction; None without a prediction."""
    constraint: DraftConstraint | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    draft: Draft = NO_DRAFT
    """The draft that was chosen last. The next step verifies its first tokens."""
    forced: Draft = NO_DRAFT
    """The tokens that the grammar forced when `propose` was called last. Every draft begins with them."""

    def propose(self, max_tokens: int) -> list[float]:
        """Chooses a draft of up to `max_tokens` tokens and stores it in `draft`.

        Tokens that the grammar forces come first. After them, each drafter in `lookups` guesses further tokens. The
        guess with the most expected accepted tokens is used. Returns one probability for each draft token: that this
        token and all draft tokens before it are accepted.
        """
        for drafter in self.lookups:
            drafter.observe()
        self.forced = start = self._forced(max_tokens)
        self.draft, best = start, self.rates.survival(start)
        for drafter in self.lookups:
            span = drafter.propose(start.token_ids, max_tokens - len(start)) if len(start) < max_tokens else None
            draft = start if span is None else self.possible(Draft((*start.spans, span)))
            chances = self.rates.survival(draft)
            if sum(chances) > sum(best):
                self.draft, best = draft, chances
        return best

    def _forced(self, max_tokens: int) -> Draft:
        token_ids = () if self.constraint is None else self.constraint.forced_token_ids(max_tokens)
        return Draft((DraftSpan(DraftSource.GRAMMAR, 0, token_ids),)) if token_ids else NO_DRAFT

    def possible(self, draft: Draft) -> Draft:
        """Cuts a draft after its first stop token, and before the first token that the constraint does not allow."""
        if not self.stop_token_ids.isdisjoint(draft.token_ids):
            ends_at = next(index for index, token in enumerate(draft.token_ids) if token in self.stop_token_ids)
            draft = draft.first(ends_at + 1)
        return draft if self.constraint is None else draft.first(self.constraint.allowed_length(draft.token_ids))

    def learn(self, num_verified: int, num_taken: int) -> DraftCounts:
        """Compares the draft with the `num_taken` tokens that a step has just appended to the request.

        The step verified the first `num_verified` draft tokens. If it verified none, the first draft token is still
        compared, to learn whether it was right. Returns the counts of this step.
        """
        added = self.token_ids[len(self.token_ids) - num_taken :]
        drafted = [(span, token) for span in self.draft.spans for token in span.token_ids]
        right: list[DraftSpan] = []
        for (span, guess), token in zip(drafted[: max(num_verified, 1)], added, strict=False):
            is_right = guess == token
            self.rates.record(span.source, span.evidence, is_accepted=is_right)
            if not is_right:
                break
            right.append(span)
        accepted = right[:num_verified]
        guessed = [span for span, _ in drafted[:num_verified]]
        self.draft = self.forced = NO_DRAFT
        news = DraftCounts(
            drafted=num_verified,
            accepted=len(accepted),
            forced=_count(accepted, DraftSource.GRAMMAR),
            model_drafted=_count(guessed, DraftSource.MODEL),
            model_accepted=_count(accepted, DraftSource.MODEL),
        )
        self.counts.add(news)
        return news

    def report(self) -> DraftReport:
        """Returns the request's total counts of draft tokens and of predicted tokens. Call it at the end of the
        request.
        """
        if self.prediction is not None:
            self.prediction.observe()
        return DraftReport(
            drafted_tokens=self.counts.drafted,
            accepted_tokens=self.counts.accepted,
            forced_tokens=self.counts.forced,
            accepted_prediction_tokens=0 if self.prediction is None else self.prediction.num_matched,
            rejected_prediction_tokens=0 if self.prediction is None else self.prediction.num_unmatched,
        )


def _count(spans: list[DraftSpan], source: DraftSource) -> int:
    return sum(span.source is source for span in spans)
