"""A draft model whose guesses a function makes, and whose passes take time on a manual clock."""

from collections.abc import Callable, Sequence

from graftwork.engine.speculative.draft_model import DraftContext, Guess, GuessPass
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import RequestId


class ScriptedDraftModel:
    """A DraftModel. `guess_after` returns the guess after a text; None where it has none."""

    def __init__(
        self,
        guess_after: Callable[[DraftContext], Guess | None],
        clock: ManualClock,
        pass_s: float,
        *,
        row_s: float = 0.0,
        max_tokens: int = 10_000,
    ) -> None:
        self.relative_cost = 0.1
        self.contexts: list[DraftContext] = []
        """What was guessed, in order."""
        self.num_passes = 0
        self.known: dict[RequestId, int] = {}
        """How many tokens of each request it has read."""
        self._guess_after = guess_after
        self._clock = clock
        self._pass_s, self._row_s = pass_s, row_s
        self._max_tokens = max_tokens

    def reaches(self, context: DraftContext, max_tokens: int) -> bool:
        return context.num_tokens + max_tokens <= self._max_tokens

    def num_missing(self, context: DraftContext) -> int:
        return max(context.num_tokens - self.known.get(context.request_id, 0), 1)

    def guess(self, contexts: Sequence[DraftContext]) -> GuessPass:
        assert len({context.request_id for context in contexts}) == len(contexts), "a request is guessed for twice"
        num_rows = sum(map(self.num_missing, contexts))
        self._clock.advance(self._pass_s + self._row_s * num_rows)
        self.num_passes += 1
        for context in contexts:
            assert self.reaches(context, 0)
            self.known[context.request_id] = context.num_tokens
        self.contexts += contexts
        return GuessPass(tuple(map(self._guess_after, contexts)), num_rows)

    def forget(self, request_id: RequestId) -> None:
        self.known.pop(request_id, None)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
