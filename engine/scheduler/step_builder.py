"""A sequence's part of one step: its next known tokens, the guesses behind them, and how their rows are sampled."""

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import SampleSpec, SequenceSlice
from graftwork.engine.scheduler.request_state import Sequence
from graftwork.engine.scheduler.resources import GrammarResidency


class Slicer:
    """Reads sequences and grammars; changes nothing."""

    def __init__(self, page_tokens: int, grammars: GrammarResidency) -> None:
        self._page_tokens = page_tokens
        self._grammars = grammars

    def slice(self, sequence: Sequence, num_tokens: int, drafted: tuple[int, ...]) -> SequenceSlice:
        """The next `num_tokens` known tokens of a sequence that has the pages for them and for what is drafted."""
        start, known_end = sequence.num_computed, sequence.num_computed + num_tokens
        is_last = known_end == len(sequence.token_ids)
        return SequenceSlice(
            request_id=sequence.request_id,
            token_ids=(*sequence.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(sequence.pages[: pages_for(known_end + len(drafted), self._page_tokens)]),
            adapters=sequence.request.adapters,
            samples=self._sample_specs(sequence, drafted) if is_last else (),
        )

    def _sample_specs(self, sequence: Sequence, drafted: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """For the token after the last known one, and for those after each drafted one, should it come true."""
        return tuple(self._sample_spec(sequence, drafted[:count]) for count in range(len(drafted) + 1))

    def _sample_spec(self, sequence: Sequence, drafted: tuple[int, ...]) -> SampleSpec:
        banned = sequence.banned_token_ids(len(drafted))
        return SampleSpec(
            params=sequence.request.sampling,
            seed=sequence.seed,
            position=len(sequence.token_ids) + len(drafted),
            banned_token_ids=banned,
            history=sequence.counted_history(),
            draft_token_ids=drafted,
            mask=self._grammars.row(sequence.request_id, banned, drafted),
        )
