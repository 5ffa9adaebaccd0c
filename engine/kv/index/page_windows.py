"""Says which pages the windowed layer groups of a model keep for a request. Computes with numbers only.

A layer with a window of `window` tokens computes the query at position p from the keys at [p - window + 1, p]. A prompt
goes on at the end of a whole page, so a request with n computed tokens needs the pages from which its last whole page,
or a later position, can be continued:

    tokens    0 ........................ whole page ... n
    pages           | spare | first needed ........... | next

One page more is kept. A request whose prompt is exactly what is cached computes its last token again, so it goes on one
page earlier.

Invariant: a page that `first_page` leaves out is seen by no query at or after the last whole page.
"""

from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import PageKey, child_key, pages_for

_SPARE_PAGES = 1


@dataclass(frozen=True, slots=True)
class PageWindows:
    """The window of the layer groups that do not keep the whole context."""

    window: int
    """The widest window of these groups, in tokens."""
    num_groups: int
    """The number of these groups. Each has pages of its own."""
    page_tokens: int
    step_tokens: int
    """The most tokens of one request that the steps in flight compute together."""

    def first_needed(self, num_pages: int) -> int:
        """Returns the first page that a request needs to go on after `num_pages` whole pages."""
        return max((num_pages * self.page_tokens - self.window + 1) // self.page_tokens, 0)

    def first_page(self, num_tokens: int) -> int:
        """Returns the first page that a request with `num_tokens` computed tokens keeps."""
        return max(self.first_needed(num_tokens // self.page_tokens) - _SPARE_PAGES, 0)

    def most_pages(self, num_tokens: int) -> int:
        """Returns the most pages of one group that a request with up to `num_tokens` tokens holds at a time."""
        most = pages_for(self.window + self.step_tokens, self.page_tokens) + 3 + _SPARE_PAGES
        return min(pages_for(num_tokens, self.page_tokens), most)


def frames_for(num_tokens: int, page_tokens: int, windows: PageWindows | None) -> int:
    """Returns the most pages, of all layer groups together, that a request with `num_tokens` tokens holds at a time."""
    whole = pages_for(num_tokens, page_tokens)
    return whole if windows is None else whole + windows.num_groups * windows.most_pages(num_tokens)


def window_key(page: PageKey, group: int) -> PageKey:
    """Returns the key of the page of a windowed group that stands beside the page with the key `page`.

    `group` counts the windowed groups from 0. The result is the key of no page of tokens: it is computed from one number
    that is no token id.
    """
    return child_key(page, (_NO_TOKEN - group,))


_NO_TOKEN = 2**32 - 1
