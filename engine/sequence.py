"""A request while it is served: its tokens, how far its KV has caught up with them, and the pages it holds."""

from dataclasses import dataclass, field

from graftwork.engine.pages import PageId
from graftwork.engine.prefix_tree import CacheScope
from graftwork.engine.request import EngineRequest, FinishReason
from graftwork.engine.token_history import TokenHistory
from graftwork.platform.ids import RequestId


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)


def history_for(request: EngineRequest) -> TokenHistory | None:
    """What its penalties count, if it has any; a presence and a frequency penalty leave the prompt alone."""
    if not request.sampling.counts_tokens:
        return None
    return TokenHistory(request.prompt_token_ids if request.sampling.repetition_penalty != 1 else ())


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the Scheduler; nobody else changes it."""

    request: EngineRequest
    scope: CacheScope
    seed: int
    arrived_at: float
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    """Prompt and completion together: what was asked, cut to the context."""
    token_ids: list[int] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in `pages`."""
    history: TokenHistory | None = None
    """What penalties count; None where there are none. May be behind: see `counted_history`."""

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Known tokens that are not computed yet: 1 while decoding, more while catching up."""
        return len(self.token_ids) - self.num_computed

    def pages_still_needed(self, page_tokens: int) -> int:
        """Pages it may yet take, at worst. The last token's KV is never needed."""
        return pages_for(self.max_total_tokens - 1, page_tokens) - len(self.pages)

    def banned_token_ids(self) -> tuple[int, ...]:
        """What may not be sampled next."""
        if self.num_generated >= self.request.sampling.min_tokens:
            return ()
        return tuple(sorted(self.stop_token_ids))

    def counted_history(self) -> TokenHistory | None:
        """The history with every token that is known by now."""
        if self.history is not None:
            self.history.extend(self.token_ids[self.num_prompt + self.history.num_made :])
        return self.history

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ended it, and why."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
