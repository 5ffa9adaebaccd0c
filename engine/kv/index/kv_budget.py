"""Says how much of a prompt's KV a request with a budget keeps, and which tokens always stay. Computes with numbers only.

    prompt    0 1 2 3 | 4 ................................ | n - 32 ... n - 1      sinks, middle, observed
    kept      0 1 2 3 |   those of the middle that the     | n - 32 ... n - 1
                          observed queries attend to most

The prompt is computed exactly. Then each KV head of each layer keeps the budget's tokens: the sinks, the last ones, whose
queries are observed, and as many of the middle as the budget has room for. All heads keep equally many, so their KV fits
into pages again, one token after the other, and the pages of the prompt are given back.

Invariant: what is given up is a whole number of pages, so a token keeps its place within a page. Therefore up to a page more
than the budget is kept.
Source: SnapKV (Li et al. 2024, arXiv 2404.14469), with the sinks of StreamingLLM.
"""

from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import SMALLEST_KV_BUDGET

OBSERVED_QUERIES = 32
"""The last tokens of the prompt: the attention of their queries decides what is kept. Source: SnapKV's own experiments."""
KEPT_SINKS = 4
POOLED_KEYS = 7
"""A key's score is the largest of those around it, so many in all: tokens are kept with their neighbours. Source: SnapKV."""

assert SMALLEST_KV_BUDGET > OBSERVED_QUERIES + KEPT_SINKS


@dataclass(frozen=True, slots=True)
class PromptEviction:
    """What one request gives up of its prompt."""

    num_prompt: int
    """The tokens of the prompt."""
    num_given_up: int
    """The pages of the prompt that are given back, at least 1."""
    page_tokens: int

    @classmethod
    def of(cls, num_prompt: int, budget: int | None, page_tokens: int) -> "PromptEviction | None":
        """Returns what a prompt gives up for a budget in tokens; None if it gives up nothing."""
        num_pages = 0 if budget is None else max(num_prompt - budget, 0) // page_tokens
        return cls(num_prompt, num_pages, page_tokens) if num_pages else None

    @property
    def num_kept(self) -> int:
        """The tokens that each KV head keeps."""
        return self.num_prompt - self.num_given_up * self.page_tokens

    @property
    def num_pages(self) -> int:
        """The pages of the kept tokens."""
        return pages_for(self.num_kept, self.page_tokens)

    @property
    def num_reusable(self) -> int:
        """The first tokens of the prompt whose KV may come from the cache: the observed queries are computed."""
        return self.num_prompt - OBSERVED_QUERIES

    def chunk(self, start: int, num_tokens: int, room: int) -> int:
        """Returns how many of the next `num_tokens` tokens from position `start` on a step computes.

        A chunk ends with the prompt, and one chunk has all observed queries. It may take more than `num_tokens` for that, up
        to `room`.
        """
        left = self.num_prompt - start
        if left <= 0 or num_tokens <= left - OBSERVED_QUERIES:
            return num_tokens
        if num_tokens >= left:
            return left
        return left - OBSERVED_QUERIES or (left if left <= room else 0)
