"""The name of a page by its content: a chain of digests over the scope and every token down to the page's end.

Two pages with one key hold the same KV, in whichever process and on whichever tier they lie.
Every part is framed by its length under a domain tag, so that no two chains can collide.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""32 bytes: SHA-256 of the scope and all tokens down to the end of the page."""


KEY_BYTES = 32


_ROOT_TAG = b"graftwork/page-root/1"


_PAGE_TAG = b"graftwork/page-key/1"


def root_key(scope: bytes) -> PageKey:
    """The key that the first page of a scope has for its parent: it stands for no tokens at all."""
    return PageKey(hashlib.sha256(_framed(_ROOT_TAG) + _framed(scope)).digest())


def child_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """The key of a page of `token_ids`, each in [0, 2^32), behind the page of `parent`."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return PageKey(hashlib.sha256(_PAGE_PREFIX + _framed(parent) + _framed(tokens)).digest())


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


_PAGE_PREFIX = _framed(_PAGE_TAG)


CacheScope = NewType("CacheScope", bytes)
"""A digest of everything that must agree for KV to be shared; see engine/kv/index/cache_scope.py."""


PageTokens = tuple[int, ...]


Edge = tuple[CacheScope, PageTokens]


@dataclass(frozen=True, slots=True)
class PrefixScope:
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
        return root_key(self.at(index) + (parent or b""))


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)


def edges(scope: PrefixScope, token_ids: Sequence[int], page_tokens: int) -> Iterator[Edge]:
    """The edges of the whole pages of `token_ids`, from the root down."""
    for index in range(len(token_ids) // page_tokens):
        yield scope.at(index), tuple(token_ids[index * page_tokens : (index + 1) * page_tokens])


def page_key(scope: PrefixScope, index: int, parent: PageKey | None, tokens: PageTokens) -> PageKey:
    """The key of page `index`, which holds `tokens`, below the page of key `parent`."""
    return child_key(scope.base_key(index, parent), tokens)
