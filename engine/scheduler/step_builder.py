"""Builds one request's part of a step: its next known tokens, the draft behind them, and how to sample their rows.

Owns no state. Reads requests and grammars, and never changes them.
Invariant: rows are sampled only where a slice ends with the last known token.
"""

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.resources import GrammarProvider


class StepBuilder:
    """Turns the state of a request into a slice of a step."""

    def __init__(self, page_tokens: int, grammars: GrammarProvider) -> None:
        self._page_tokens = page_tokens
        self._grammars = grammars

    def slice(self, state: RequestState, num_tokens: int, drafted: tuple[int, ...]) -> RequestSlice:
        """Returns a slice of the next `num_tokens` known tokens, then `drafted`. The request must have pages for both."""
        start, known_end = state.num_computed, state.num_computed + num_tokens
        is_last = known_end == len(state.token_ids)
        return RequestSlice(
            request_id=state.request_id,
            token_ids=(*state.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(state.pages[: pages_for(known_end + len(drafted), self._page_tokens)]),
            adapters=state.request.adapters,
            samples=self._sample_specs(state, drafted) if is_last else (),
        )

    def _sample_specs(self, state: RequestState, drafted: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """Returns how to sample the token after the last known token, and the token after each draft token."""
        return tuple(self._sample_spec(state, drafted[:count]) for count in range(len(drafted) + 1))

    def _sample_spec(self, state: RequestState, drafted: tuple[int, ...]) -> SampleSpec:
        banned = state.banned_token_ids(len(drafted))
        return SampleSpec(
            params=state.request.sampling,
            seed=state.seed,
            position=len(state.token_ids) + len(drafted),
            banned_token_ids=banned,
            history=state.updated_history(),
            draft_token_ids=drafted,
            mask=self._grammars.row(state.request_id, banned, drafted),
        )
