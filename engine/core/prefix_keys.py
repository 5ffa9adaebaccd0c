"""Derives two things from the tokens of a request: the keys of its KV pages, and the token counts for penalties.

Owns the format of page keys. Never holds KV or text.

A cache scope is a digest of all that two requests must have in common, besides tokens, to share KV. A page's key is a
digest of the cache scope and of all tokens from the start of the prompt to the end of the page. It is computed from the
key of the page before. Invariant: two pages with the same key hold the same KV, in any process and on any tier. The
hashed bytes begin with a tag, and the length of each part precedes the part, so two different prefixes never hash the
same bytes.

A TokenHistory counts the generated tokens of one request. New tokens are added to its counts, so a step never counts a
whole context. Draft tokens are counted only in a copy, which a step makes.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from graftwork.engine.core.sampling import RollingWindow

PageKey = NewType("PageKey", bytes)
"""32 bytes: SHA-256 of the cache scope and of all tokens up to the end of the page."""


KEY_BYTES = 32


_ROOT_TAG = b"graftwork/page-root/1"


_PAGE_TAG = b"graftwork/page-key/1"


def root_key(scope: bytes) -> PageKey:
    """Returns the key that stands before the first page of a cache scope, as its parent. No page has this key.

    `scope` is a digest of all that requests must have in common, besides tokens, to share KV.
    """
    return PageKey(hashlib.sha256(_framed(_ROOT_TAG) + _framed(scope)).digest())


def child_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Returns the key of a page that holds the tokens `token_ids`. `parent` is the key of the page before.

    Each token id is in [0, 2^32).
    """
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return PageKey(hashlib.sha256(_PAGE_PREFIX + parent + _framed(tokens)).digest())


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


_PAGE_PREFIX = _framed(_PAGE_TAG) + KEY_BYTES.to_bytes(8, "big")
"""What is hashed before the key of the parent."""


CacheScope = NewType("CacheScope", bytes)
"""A digest of everything, besides tokens, that must be equal for two requests to share KV (see
engine/kv/index/cache_scope.py).
"""


PageTokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """The cache scope of each page of one prompt. Two prompts can share a page only if its scope is the same in both.

    A cache scope is a digest of all that must be equal, besides tokens, to share KV. The first `public_pages` pages
    have the scope `public`, which is the same for all isolation domains. The other pages have the scope `own`.
    """

    own: CacheScope
    public: CacheScope | None = None
    """The scope of the first `public_pages` pages; None if no page is public."""
    public_pages: int = 0
    rolling: RollingWindow | None = None
    """What the tokens of the prompt attend to, if that is not all before them: then pages in the middle are not kept."""

    def at(self, index: int) -> CacheScope:
        """Returns the cache scope of page `index` of the prompt. It decides which requests may share the page.

        This is `public` for the first `public_pages` pages, else `own`.
        """
        return self.public if self.public is not None and index < self.public_pages else self.own

    def base_key(self, index: int, parent: PageKey | None) -> PageKey:
        """Returns the key that is the parent of page `index` when the key of this page is computed.

        In general this is `parent`, the key of the page before. The first page of a cache scope has another parent: a
        root key, which is computed from the scope and from `parent`, if there is one.
        """
        begins = index == 0 or (self.public is not None and index == self.public_pages)
        if not begins:
            assert parent is not None
            return parent
        return root_key(self.at(index) + (parent or b""))


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Returns how many KV pages `num_tokens` tokens need. A page holds `page_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def page_keys(
    scope: PrefixScope, token_ids: Sequence[int], page_tokens: int, known: list[PageKey] | None = None, start: int = 0
) -> Iterator[PageKey]:
    """Yields the keys of the whole pages of a prompt, from page `start` on, in order. Each token id is in [0, 2^32).

    Takes keys of the first pages from `known`, and appends those that it computes. `known` may be used again for the same
    prompt, for its beginnings, and for what it grows to.
    """
    known, end = [] if known is None else known, len(token_ids) // page_tokens
    while start < end:
        ready = known[start:end]
        if ready:
            yield from ready
            start += len(ready)
        else:
            _append_keys(scope, token_ids, page_tokens, known)


def _append_keys(scope: PrefixScope, token_ids: Sequence[int], page_tokens: int, known: list[PageKey]) -> None:
    """Computes the keys of the next pages of a prompt, and appends them to those of the pages before."""
    first, page_bytes = len(known), _ID_BYTES * page_tokens
    end = min(first + _BATCH_PAGES, len(token_ids) // page_tokens)
    if scope.public is not None and first < scope.public_pages:
        end = min(end, scope.public_pages)
    tokens, length = _packed(token_ids[first * page_tokens : end * page_tokens]), page_bytes.to_bytes(8, "big")
    key, join, digest = scope.base_key(first, known[-1] if known else None), b"".join, hashlib.sha256
    for place in range(0, len(tokens), page_bytes):
        key = PageKey(digest(join((_PAGE_PREFIX, key, length, tokens[place : place + page_bytes]))).digest())
        known.append(key)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as little-endian numbers of 4 bytes."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


_ID_BYTES = 4
_BATCH_PAGES = 8
"""How many keys are computed at a time: many are faster, and few waste less time where the first page is not cached."""


def page_key(scope: PrefixScope, index: int, parent: PageKey | None, tokens: PageTokens) -> PageKey:
    """Returns the key of page `index` of a prompt.

    The page holds `tokens`. `parent` is the key of the page before, or None for the first page.
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
    """Counts how often one request has generated each token.

    The tokens of the prompt have counts too, which start at 0.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        """Starts with the prompt's tokens, each with a count of 0."""
        self._counted = TokenCounts()
        self._counted.token_ids.extend(dict.fromkeys(prompt_token_ids))
        self._counted.counts.extend([0] * len(self._counted))
        self._num_prompt = len(self._counted)
        self._generated = array(_WORD)
        self._places = {token: place for place, token in enumerate(self._counted.token_ids)}

    @property
    def num_generated_tokens(self) -> int:
        """The number of generated tokens that have been counted."""
        return len(self._generated)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds generated tokens to the counts. Each generated token must be passed once."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._counted))
            if place == len(self._counted):
                self._counted.token_ids.append(token)
                self._counted.counts.append(0)
            self._counted.counts[place] += 1
            self._generated.append(token)

    def changed_since(self, num_generated: int) -> list[tuple[int, int, bool]]:
        """Returns the distinct tokens that were counted after the first `num_generated` generated tokens, each with its
        count, and with whether the prompt contains it.
        """
        changed = dict.fromkeys(self._generated[num_generated:])
        places = [self._places[token] for token in changed]
        return [(self._counted.token_ids[at], self._counted.counts[at], at < self._num_prompt) for at in places]

    def all_counts(self) -> list[tuple[int, int, bool]]:
        """Returns all tokens of the prompt and the answer, in the form of `changed_since`."""
        pairs = zip(self._counted.token_ids, self._counted.counts, strict=True)
        return [(token, count, at < self._num_prompt) for at, (token, count) in enumerate(pairs)]

    def check_integrity(self) -> None:
        """Checks that each token has one count, and that the counts add up to the number of generated tokens.

        Raises AssertionError if not.
        """
        assert len(self._counted.token_ids) == len(self._counted.counts) == len(self._places)
        assert all(self._places[token] == place for place, token in enumerate(self._counted.token_ids))
        assert sum(self._counted.counts) == self.num_generated_tokens, "generated tokens were counted wrongly"

    def copy_to(self, target: TokenCounts, draft_token_ids: Iterable[int] = ()) -> int:
        """Appends each distinct token of this history and its count to `target`. Returns how many tokens were appended.

        The tokens in `draft_token_ids` are counted in `target` as if they had been generated. This history does not
        change.
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
