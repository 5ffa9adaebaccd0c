"""Drafts from the client's prediction of the answer, which OpenAI's `prediction` field contains.

Owns a cursor: the position in the prediction that the answer has reached. When a token of the answer differs from the
prediction, the cursor stops after the wrong predicted token. When the last few tokens of the answer occur in the
prediction again, the cursor moves to the position after this occurrence. If there are several, the nearest one after
the cursor is taken, or else the last one before the cursor. So drafting continues right after a passage that the answer
omits, adds, changes or moves.
"""

from bisect import bisect_left

from graftwork.engine.speculative.draft import DraftSource, DraftSpan

_RESYNC_LENGTHS = (4, 2)
"""The numbers of last tokens of the answer that must occur in the prediction to move the cursor. Four are tried before
two.
"""


class PredictionFollower:
    """Finds which position in the client's prediction one request's answer has reached, and drafts the tokens after it."""

    def __init__(self, token_ids: list[int], prediction: tuple[int, ...], num_prompt: int) -> None:
        """`token_ids` is the request's own list, which grows. Its first `num_prompt` tokens are the prompt."""
        self.num_matched = 0
        """The number of tokens of the prediction that are part of the answer, each counted once."""
        self._token_ids = token_ids
        self._num_prompt = self._num_seen = num_prompt
        self._prediction = prediction
        self._cursor = 0
        self._run = 0
        """The number of tokens at the end of the answer that match the prediction one after another."""
        self._matched_to = 0
        """The position in the prediction before which no more tokens are counted."""
        self._counted_to = self._num_prompt
        """The position in `token_ids` before which no more tokens are counted."""
        self._places = {length: _places(prediction, length) for length in _RESYNC_LENGTHS}

    @property
    def num_unmatched(self) -> int:
        """The number of tokens of the client's prediction that are not part of the answer."""
        return len(self._prediction) - self.num_matched

    def observe(self) -> None:
        for end in range(self._num_seen + 1, len(self._token_ids) + 1):
            self._take(end)
        self._num_seen = len(self._token_ids)

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        if drafted:
            return None  # the cursor does not follow the drafted tokens
        following = self._prediction[self._cursor : self._cursor + max_tokens]
        return DraftSpan(DraftSource.PREDICTION, self._run, following) if following else None

    def _take(self, end: int) -> None:
        """Moves the cursor by one token of the answer, the one at `end - 1`."""
        if self._cursor < len(self._prediction) and self._prediction[self._cursor] == self._token_ids[end - 1]:
            self._cursor += 1
            self._run += 1
            self._count(1, end)
            return
        was_following, self._run = self._run > 0 or self._cursor == 0, 0
        if not self._resynchronise(end) and was_following:
            self._cursor = min(self._cursor + 1, len(self._prediction))

    def _resynchronise(self, end: int) -> bool:
        for length in _RESYNC_LENGTHS:
            start = end - length
            places = self._places[length].get(tuple(self._token_ids[start:end])) if start >= self._num_prompt else None
            if places:
                self._cursor = places[min(bisect_left(places, self._cursor), len(places) - 1)]
                self._run = length
                self._count(length, end)
                return True
        return False

    def _count(self, num_tokens: int, end: int) -> None:
        """Adds to `num_matched` those of the `num_tokens` tokens before `end` that were not counted before.

        These tokens equal the tokens before the cursor in the prediction.
        """
        self.num_matched += max(0, min(num_tokens, self._cursor - self._matched_to, end - self._counted_to))
        self._matched_to = max(self._matched_to, self._cursor)
        self._counted_to = end


def _places(tokens: tuple[int, ...], length: int) -> dict[tuple[int, ...], list[int]]:
    """Returns the positions after each n-gram, ascending."""
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(length, len(tokens) + 1):
        places.setdefault(tokens[end - length : end], []).append(end)
    return places
