"""Says which pages a request with a rolling window keeps. Computes with numbers only.

    tokens    0 ..... sinks .................................. whole page ... n
    pages           |        given up       | spare | first needed ....... | next

Each token attends to the first tokens of the text and to the last ones (see RollingWindow), so what lies between is needed
by nobody who goes on at the end. In the prefix tree, the pages of the sinks follow each other, and each page after them is
a child of the last of these, so it is evicted whether or not pages before it are there:

    page 0 ── page 1 ┬── page 40
                     ├── page 41
                     └── page 42         sinks in pages 0 and 1

Invariant: a page that `first_page` leaves out is seen by no query at or after the last whole page.
Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.kv.index.page_windows import PageWindows


@dataclass(frozen=True, slots=True)
class RollingPages:
    """The pages of tokens that requests with one rolling window keep: those of the sinks, and the last ones."""

    sink_pages: int
    """The pages that have sinks."""
    last: PageWindows
    """What is kept of the end of a text."""

    @classmethod
    def of(cls, window: RollingWindow, page_tokens: int, step_tokens: int, layer_window: int) -> "RollingPages":
        """Returns the pages of requests with `window`. Layers with a window of their own see `layer_window` tokens at most.

        `step_tokens` is the most tokens of one request that the steps in flight compute together.
        """
        seen = max(window.window, layer_window)
        return cls(pages_for(window.sinks, page_tokens), PageWindows(seen, 1, page_tokens, step_tokens))

    def first_needed(self, num_pages: int) -> int:
        """Returns the first page after the sinks that a request needs to go on after `num_pages` whole pages."""
        return max(self.last.first_needed(num_pages), self.sink_pages)

    def first_page(self, num_tokens: int) -> int:
        """Returns the first page after the sinks that a request with `num_tokens` computed tokens keeps."""
        return max(self.last.first_page(num_tokens), self.sink_pages)

    def needed(self, num_pages: int) -> Iterable[int]:
        """Yields the pages that a request needs to go on after `num_pages` whole pages: the sinks, then the last one first."""
        yield from range(min(self.sink_pages, num_pages))
        yield from range(num_pages - 1, self.first_needed(num_pages) - 1, -1)

    def kept(self, num_pages: int) -> list[int]:
        """Returns the pages that are kept of a text with `num_pages` whole pages, in order."""
        first = self.first_page(num_pages * self.last.page_tokens)
        return [*range(min(self.sink_pages, num_pages)), *range(first, num_pages)]

    def most_pages(self, num_tokens: int) -> int:
        """Returns the most pages that a request with up to `num_tokens` tokens holds at a time."""
        return min(pages_for(num_tokens, self.last.page_tokens), self.sink_pages + self.last.most_pages(num_tokens))
