"""How often guesses come true, by where they come from and how long their match is.

Two levels: the engine's own record, which begins with what was measured on agent traces, and one for each sequence,
which begins with the engine's. A sequence whose guesses fail stops paying for them within a few tokens, whatever its
neighbours say; and one that goes over to quoting a tool's result is believed as soon.
"""

from dataclasses import dataclass, field

from graftwork.engine.drafting.draft import Draft, DraftSource

_PRIORS: dict[DraftSource, tuple[float, ...]] = {
    DraftSource.GRAMMAR: (0.95,) * 7,
    DraftSource.PREDICTION: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97),
    DraftSource.SESSION: (0.2, 0.25, 0.35, 0.5, 0.7, 0.85, 0.9),
    DraftSource.CACHE: (0.2, 0.25, 0.4, 0.5, 0.7, 0.85, 0.9),
}
"""By bucket of match length: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, from 32 on."""
_ENGINE_MEMORY = 400
_SEQUENCE_MEMORY = 16
_PRIOR_WEIGHT = 3
"""Tokens that an inherited rate counts for."""


def bucket_of(match_length: int) -> int:
    return min(match_length.bit_length(), 6)


@dataclass(slots=True)
class AcceptanceRates:
    """The rate of each source and bucket, as an average that forgets."""

    inherited: "AcceptanceRates | None" = None
    _rates: dict[tuple[DraftSource, int], float] = field(default_factory=dict)
    _counts: dict[tuple[DraftSource, int], int] = field(default_factory=dict)

    def rate(self, source: DraftSource, match_length: int) -> float:
        """The chance that a guess behind such a match comes true."""
        return self._rate((source, bucket_of(match_length)))

    def survival(self, draft: Draft) -> list[float]:
        """The chance of each token of a draft that it and all before it come true."""
        chances: list[float] = []
        chance = 1.0
        for span in draft.spans:
            for ahead in range(len(span.token_ids)):
                chance *= self._rate((span.source, bucket_of(span.match_length + ahead)))
                chances.append(chance)
        return chances

    def record(self, source: DraftSource, match_length: int, *, came_true: bool) -> None:
        """Note one guess, here and in what this was inherited from."""
        key = (source, bucket_of(match_length))
        memory = _ENGINE_MEMORY if self.inherited is None else _SEQUENCE_MEMORY
        rate, count = self._rate(key), min(self._counts.get(key, _PRIOR_WEIGHT) + 1, memory)
        self._rates[key] = rate + (came_true - rate) / count
        self._counts[key] = count
        if self.inherited is not None:
            self.inherited.record(source, match_length, came_true=came_true)

    def _rate(self, key: tuple[DraftSource, int]) -> float:
        rate = self._rates.get(key)
        if rate is not None:
            return rate
        return _PRIORS[key[0]][key[1]] if self.inherited is None else self.inherited._rate(key)
