"""Estimates how often draft tokens are accepted, by their source and by the length of their match.

Owns running averages on two levels. The averages of the engine start from rough priors, and the averages of a request
start from those of the engine. So each request adapts on its own: if its drafts fail, it soon drafts less, and if it
starts to quote a tool result, it soon drafts more.
All tokens of a span use the match length at the start of the span, because a quotation can end at any token.
"""

from graftwork.engine.speculative.draft import Draft, DraftSource

_LAST_BUCKET = 6
_PRIORS: dict[DraftSource, tuple[float, ...]] = {
    DraftSource.GRAMMAR: (0.95,) * 7,
    DraftSource.PREDICTION: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95),
    DraftSource.SESSION: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
    DraftSource.CACHE: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
}
"""Acceptance rates by bucket of match length: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 and more."""
_ENGINE_MEMORY = 400
_REQUEST_MEMORY = 32
"""An average covers about this many draft tokens. Older ones lose weight."""
_PRIOR_WEIGHT = 8
"""An inherited rate weighs as much as this many draft tokens."""


class AcceptanceRates:
    """The acceptance rate of each source and bucket, as a running average."""

    def __init__(self, inherited: "AcceptanceRates | None" = None) -> None:
        self._inherited = inherited
        self._rates: dict[DraftSource, list[float]] = {
            source: list(priors if inherited is None else inherited._rates[source])
            for source, priors in _PRIORS.items()
        }
        self._counts = {name: [_PRIOR_WEIGHT] * (_LAST_BUCKET + 1) for name in _PRIORS}
        self._memory = _ENGINE_MEMORY if inherited is None else _REQUEST_MEMORY

    def rate(self, source: DraftSource, match_length: int) -> float:
        """Returns the probability that a draft token after such a match is accepted if all draft tokens before it were."""
        return self._rates[source][_bucket(match_length)]

    def survival(self, draft: Draft) -> list[float]:
        """Returns, for each token of a draft, the probability that it and all tokens before it are accepted."""
        chances: list[float] = []
        chance = 1.0
        for span in draft.spans:
            rate = self.rate(span.source, span.match_length)
            for _ in span.token_ids:
                chance *= rate
                chances.append(chance)
        return chances

    def record(self, source: DraftSource, match_length: int, *, is_accepted: bool) -> None:
        """Records one verified draft token, here and in the rates from which these were inherited."""
        bucket = _bucket(match_length)
        counts, rates = self._counts[source], self._rates[source]
        counts[bucket] = min(counts[bucket] + 1, self._memory)
        rates[bucket] += (is_accepted - rates[bucket]) / counts[bucket]
        if self._inherited is not None:
            self._inherited.record(source, match_length, is_accepted=is_accepted)


def _bucket(match_length: int) -> int:
    return min(match_length.bit_length(), _LAST_BUCKET)
