"""Counts how often a request has generated each token. Penalties use the counts.

Owns two flat arrays for each request and extends them token by token, so a step never counts a context again. Holds
known tokens only. Draft tokens are added to the copy that a step makes, never to the arrays here.
"""

from array import array
from collections.abc import Iterable

_WORD = "q"
"""Signed 64-bit integers, as index tensors use them."""


class TokenCounts:
    """Distinct tokens and their counts: two arrays of the same length."""

    def __init__(self) -> None:
        self.token_ids = array(_WORD)
        self.counts = array(_WORD)
        """How often each token was generated; 0 for a token that only the prompt contains."""

    def __len__(self) -> int:
        return len(self.token_ids)


class TokenHistory:
    """The token counts of one request."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        """Adds the prompt's tokens with a count of 0."""
        self._counted = TokenCounts()
        self._counted.token_ids.extend(dict.fromkeys(prompt_token_ids))
        self._counted.counts.extend([0] * len(self._counted))
        self._places = {token: place for place, token in enumerate(self._counted.token_ids)}
        self.num_generated_tokens = 0
        """Generated tokens that have been counted."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Counts generated tokens. Call it in their order."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._counted))
            if place == len(self._counted):
                self._counted.token_ids.append(token)
                self._counted.counts.append(0)
            self._counted.counts[place] += 1
            self.num_generated_tokens += 1

    def check_integrity(self) -> None:
        """Recounts the generated tokens and checks that every token is found at its index."""
        assert len(self._counted.token_ids) == len(self._counted.counts) == len(self._places)
        assert all(self._places[token] == place for place, token in enumerate(self._counted.token_ids))
        assert sum(self._counted.counts) == self.num_generated_tokens, "generated tokens were counted wrongly"

    def copy_to(self, target: TokenCounts, draft_token_ids: Iterable[int] = ()) -> int:
        """Appends each distinct token once, with its count, and returns how many were appended.

        Draft tokens count as generated.
        """
        base = len(target)
        target.token_ids.extend(self._counted.token_ids)
        target.counts.extend(self._counted.counts)
        guessed: dict[int, int] = {}
        for token in draft_token_ids:
            place = self._places.get(token)
            if place is None:
                place = guessed.setdefault(token, len(target) - base)
            if place == len(target) - base:
                target.token_ids.append(token)
                target.counts.append(0)
            target.counts[base + place] += 1
        return len(target) - base
