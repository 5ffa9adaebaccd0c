"""Which tokens a sequence holds, and how often each was made: what penalties count.

Kept up token by token, so that a step reads flat arrays instead of counting a context anew.
Never forgets: only tokens that are known for good are entered. What is merely guessed is counted on the way out.
"""

from array import array
from collections.abc import Iterable

_WORD = "q"
"""Eight bytes with a sign, as tensors of indices have them."""


class TokenCounts:
    """Distinct tokens and their counts, as two arrays that grow together."""

    def __init__(self) -> None:
        self.token_ids = array(_WORD)
        self.counts = array(_WORD)
        """How often each was made; 0 for one that only the prompt holds."""

    def __len__(self) -> int:
        return len(self.token_ids)


class TokenHistory:
    """The tokens of one sequence."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        """`prompt_token_ids` are seen, but not made."""
        self._counted = TokenCounts()
        self._counted.token_ids.extend(dict.fromkeys(prompt_token_ids))
        self._counted.counts.extend([0] * len(self._counted))
        self._places = {token: place for place, token in enumerate(self._counted.token_ids)}
        self.num_generated_tokens = 0
        """Tokens entered since the prompt."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Enter tokens that were made, in order."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._counted))
            if place == len(self._counted):
                self._counted.token_ids.append(token)
                self._counted.counts.append(0)
            self._counted.counts[place] += 1
            self.num_generated_tokens += 1

    def copy_to(self, target: TokenCounts, draft_token_ids: Iterable[int] = ()) -> int:
        """Append every token that was seen, once, with its count; guessed ones count as made. Returns how many."""
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
