"""How often guesses come true, by where they come from and how long their match is.

Two levels: the engine's own record, which begins with rough priors, and one for each sequence, which begins with the
engine's. A sequence whose guesses fail soon stops paying for them, whatever its neighbours say; and one that goes over
to quoting a tool's result is believed as soon.

All tokens of a span are judged by the match that the span began with. That the first of them came true makes the next
one no surer than the average says: a quotation is left at a point that nothing before it tells.
"""

from graftwork.engine.speculative.draft import Draft, DraftSource

_LAST_BUCKET = 6
_PRIORS: dict[DraftSource, tuple[float, ...]] = {
    DraftSource.GRAMMAR: (0.95,) * 7,
    DraftSource.PREDICTION: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95),
    DraftSource.SESSION: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
    DraftSource.CACHE: (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.85),
}
"""By bucket of match length: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, from 32 on."""
_ENGINE_MEMORY = 400
_SEQUENCE_MEMORY = 32
"""Guesses after which an average begins to forget."""
_PRIOR_WEIGHT = 8
"""Guesses that an inherited rate counts for."""


class AcceptanceRates:
    """The rate of each source and bucket, as an average that forgets."""

    def __init__(self, inherited: "AcceptanceRates | None" = None) -> None:
        self._inherited = inherited
        self._rates: dict[DraftSource, list[float]] = {
            source: list(priors if inherited is None else inherited._rates[source])
            for source, priors in _PRIORS.items()
        }
        self._counts = {name: [_PRIOR_WEIGHT] * (_LAST_BUCKET + 1) for name in _PRIORS}
        self._memory = _ENGINE_MEMORY if inherited is None else _SEQUENCE_MEMORY

    def rate(self, source: DraftSource, match_length: int) -> float:
        """The chance that a token behind such a match comes true, if those between have."""
        return self._rates[source][_bucket(match_length)]

    def survival(self, draft: Draft) -> list[float]:
        """The chance of each token of a draft that it and all before it come true."""
        chances: list[float] = []
        chance = 1.0
        for span in draft.spans:
            rate = self.rate(span.source, span.match_length)
            for _ in span.token_ids:
                chance *= rate
                chances.append(chance)
        return chances

    def record(self, source: DraftSource, match_length: int, *, came_true: bool) -> None:
        """Note one guess, here and in what this was inherited from."""
        bucket = _bucket(match_length)
        counts, rates = self._counts[source], self._rates[source]
        counts[bucket] = min(counts[bucket] + 1, self._memory)
        rates[bucket] += (came_true - rates[bucket]) / counts[bucket]
        if self._inherited is not None:
            self._inherited.record(source, match_length, came_true=came_true)


def _bucket(match_length: int) -> int:
    return min(match_length.bit_length(), _LAST_BUCKET)
