"""The way of a prompt through the prefix tree: one edge a page, each in the scope that may share it.

An operator may declare a prefix public: its pages stand in a scope of their own that every tenant reaches, and what
follows them stands in the tenant's. So an edge is (scope, tokens), and a key names the whole way down to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from graftwork.engine.page_key import PageKey, first_key, next_key

CacheScope = NewType("CacheScope", bytes)
"""A digest of everything that must agree for KV to be shared; see engine/scope.py."""

PageTokens = tuple[int, ...]
Edge = tuple[CacheScope, PageTokens]


@dataclass(frozen=True, slots=True)
class SequenceScope:
    """Where a sequence's pages may be shared."""

    own: CacheScope
    public: CacheScope | None = None
    """Of the first `public_pages`; None where nothing is public."""
    public_pages: int = 0

    def at(self, index: int) -> CacheScope:
        """The scope of page `index`."""
        return self.public if self.public is not None and index < self.public_pages else self.own

    def base_key(self, index: int, parent: PageKey | None) -> PageKey:
        """What the key of page `index` is derived from: its parent's, or where its scope begins, that scope's."""
        begins = index == 0 or (self.public is not None and index == self.public_pages)
        if not begins:
            assert parent is not None
            return parent
        return first_key(self.at(index) + (parent or b""))


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)


def edges(scope: SequenceScope, token_ids: Sequence[int], page_tokens: int) -> Iterator[Edge]:
    """The edges of the whole pages of `token_ids`, from the root down."""
    for index in range(len(token_ids) // page_tokens):
        yield scope.at(index), tuple(token_ids[index * page_tokens : (index + 1) * page_tokens])


def page_key(scope: SequenceScope, index: int, parent: PageKey | None, tokens: PageTokens) -> PageKey:
    """The key of page `index`, which holds `tokens`, below the page of key `parent`."""
    return next_key(scope.base_key(index, parent), tokens)
