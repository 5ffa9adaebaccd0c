"""Derives two things from the tokens of a request: the keys of its KV pages, and the token counts for penalties.

Owns the format of page keys and the counts. Never holds KV, text or draft tokens.

A cache scope is a digest of everything, besides tokens, that two requests must have in common to share KV. A page's key
is a digest of its cache scope and of all tokens up to the end of the page. Each key is made from the key of the page
before. Invariant: two pages with the same key hold the same KV, in any process and on any tier. The bytes that are
hashed begin with a tag, and each part has its length before it, so two different prefixes never hash the same bytes.

A TokenHistory counts the known tokens of one request. It extends two flat arrays token by token, so a step never counts
a context again. Draft tokens are counted only in the copy that a step makes.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""32 bytes: SHA-256 of the cache scope and of all tokens up to the end of the page."""


KEY_BYTES = 32


_ROOT_TAG = b"graftwork/page-root/1"


_PAGE_TAG = b"graftwork/page-key/1"


def root_key(scope: bytes) -> PageKey:
    """Returns the key that is used as parent of the first page in a cache scope. No page has this key itself.

    `scope` is the digest of everything, besides tokens, that requests must have in common to share KV.
    """
    return PageKey(hashlib.sha256(_framed(_ROOT_TAG) + _framed(scope)).digest())


def child_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Returns the key of a page that holds `token_ids`. `parent` is the key of the page before it.

    Each token id is in [0, 2^32).
    """
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return PageKey(hashlib.sha256(_PAGE_PREFIX + _framed(parent) + _framed(tokens)).digest())


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


_PAGE_PREFIX = _framed(_PAGE_TAG)


CacheScope = NewType("CacheScope", bytes)
"""A digest of everything, besides tokens, that must be equal for two requests to share KV (see
engine/kv/index/cache_scope.py).
"""


PageTokens = tuple[int, ...]


Edge = tuple[CacheScope, PageTokens]


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """The cache scopes of the pages of one prompt. Two prompts can share a page only if the page has the same scope in
    both.

    A cache scope is a digest of everything, besides tokens, that must be equal to share KV. The first `public_pages`
    pages have the scope `public`, which all isolation domains share. The others have `own`.
    """

    own: CacheScope
    public: CacheScope | None = None
    """The scope of the first `public_pages` pages; None if no page is public."""
    public_pages: int = 0

    def at(self, index: int) -> CacheScope:
        """Returns the cache scope of page `index` of the prompt: `public` for the first `public_pages` pages, else
        `own`.

        The scope decides which requests may share the page.
        """
        return self.public if self.public is not None and index < self.public_pages else self.own

    def base_key(self, index: int, parent: PageKey | None) -> PageKey:
        """Returns the key from which the key of page `index` of the prompt is made.

        This is `parent`, the key of the page before. Only for the first page of a cache scope it is a root key, which
        is made from the scope and `parent`.
        """
        begins = index == 0 or (self.public is not None and index == self.public_pages)
        if not begins:
            assert parent is not None
            return parent
        return root_key(self.at(index) + (parent or b""))


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Returns how many KV pages are needed for `num_tokens` tokens, if a page holds `page_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def edges(scope: PrefixScope, token_ids: Sequence[int], page_tokens: int) -> Iterator[Edge]:
    """Yields one edge of the prefix tree for each full page of `token_ids`, in order.

    An edge is the pair (cache scope of the page, tokens of the page). Only requests with the same cache scope share a
    page.
    """
    for index in range(len(token_ids) // page_tokens):
        yield scope.at(index), tuple(token_ids[index * page_tokens : (index + 1) * page_tokens])


def page_key(scope: PrefixScope, index: int, parent: PageKey | None, tokens: PageTokens) -> PageKey:
    """Returns the key of page `index` of a prompt. The page holds `tokens`, and `parent` is the key of the page
    before.
    """
    return child_key(scope.base_key(index, parent), tokens)


_WORD = "q"
"""The type code of `array` for signed 64-bit integers, as index tensors use them."""


class TokenCounts:
    """Two arrays of the same length: distinct token ids, and how often each of these tokens was generated."""

    def __init__(self) -> None:
        self.token_ids = array(_WORD)
        self.counts = array(_WORD)
        """The number of times that each token was generated; 0 for a token that only the prompt contains."""

    def __len__(self) -> int:
        return len(self.token_ids)


class TokenHistory:
    """Counts how often one request has generated each token. The tokens of its prompt have a count too, which starts at
    0.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        """Starts with the prompt's tokens, each with a count of 0."""
        self._counted = TokenCounts()
        self._counted.token_ids.extend(dict.fromkeys(prompt_token_ids))
        self._counted.counts.extend([0] * len(self._counted))
        self._places = {token: place for place, token in enumerate(self._counted.token_ids)}
        self.num_generated_tokens = 0
        """The number of generated tokens that have been counted."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds 1 to the count of each of these generated tokens. Pass every generated token once, in order."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._counted))
            if place == len(self._counted):
                self._counted.token_ids.append(token)
                self._counted.counts.append(0)
            self._counted.counts[place] += 1
            self.num_generated_tokens += 1

    def check_integrity(self) -> None:
        """Checks that the counts add up to the number of generated tokens, and that each token has exactly one
        count.
        """
        assert len(self._counted.token_ids) == len(self._counted.counts) == len(self._places)
        assert all(self._places[token] == place for place, token in enumerate(self._counted.token_ids))
        assert sum(self._counted.counts) == self.num_generated_tokens, "generated tokens were counted wrongly"

    def copy_to(self, target: TokenCounts, draft_token_ids: Iterable[int] = ()) -> int:
        """Appends each distinct token and its count to `target`. Returns how many tokens were appended.

        In `target`, the tokens in `draft_token_ids` count as generated tokens too. This history does not change.
        """
        base = len(target)
        target.token_ids.extend(self._counted.token_ids)
        target.counts.extend(self._counted.counts)
        guessed: dict[int, int] = {}
        for token in draft_token_ids:
            place = self._places.get(token)
            if place is None:
                place = guessed.setdefault(token, len(target) - base)
            if place == len(target) - base:
                target.token_ids.append(token)
                target.counts.append(0)
            target.counts[base + place] += 1
        return len(target) - base
