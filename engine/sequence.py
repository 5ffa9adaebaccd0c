"""A request while it is served: its tokens, how far its KV has caught up with them, and the pages it holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from graftwork.engine.drafting.sequence_drafts import SequenceDrafts
from graftwork.engine.pages import PageId
from graftwork.engine.prefix_tree import CacheScope
from graftwork.engine.request import EngineRequest, FinishReason
from graftwork.platform.ids import RequestId


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)


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
    drafts: SequenceDrafts | None = None
    """What it guesses; None until it runs."""

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

    def take(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Append tokens up to the one that ends it, and return them; what was chosen behind that one never was."""
        before = len(self.token_ids)
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if self.finish_reason() is not None:
                break
        return tuple(self.token_ids[before:])

    def max_draft_tokens(self) -> int:
        """How many may be guessed now: each may come true, and the step adds one more of its own."""
        return max(self.max_total_tokens - len(self.token_ids) - 1, 0)

    def banned_token_ids(self, num_drafted: int = 0) -> tuple[int, ...]:
        """What may not be sampled next, once so many drafted tokens have come true."""
        if self.num_generated + num_drafted >= self.request.sampling.min_tokens:
            return ()
        return tuple(sorted(self.stop_token_ids))

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ended it, and why."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
