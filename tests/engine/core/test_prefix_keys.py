"""Tests of the chain of page keys."""

import hashlib
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.prefix_keys import (
    CacheScope,
    PageKey,
    PrefixScope,
    child_key,
    page_key,
    page_keys,
    root_key,
)

pages = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=3), max_size=4)


def key_of(scope: bytes, contents: list[list[int]]) -> PageKey:
    key = root_key(scope)
    for tokens in contents:
        key = child_key(key, tokens)
    return key


@given(st.binary(max_size=40), pages, st.binary(max_size=40), pages)
def test_equal_keys_mean_equal_scope_and_pages(
    scope: bytes, contents: list[list[int]], other_scope: bytes, other_contents: list[list[int]]
) -> None:
    """Two chains have one key exactly if scope, tokens and the borders of the pages are the same."""
    is_same = (scope, contents) == (other_scope, other_contents)

    assert (key_of(scope, contents) == key_of(other_scope, other_contents)) == is_same


def test_the_form_is_fixed() -> None:
    """A key is the hash of tag, parent and little-endian tokens with their lengths, because files on disk are named
    by it."""
    parent = root_key(b"scope")
    tokens = (7).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little")
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (b"graftwork/page-key/1", parent, tokens))

    assert child_key(parent, [7, 2**32 - 1]) == hashlib.sha256(framed).digest()


publics = st.none() | st.just(CacheScope(b"public"))


@given(publics, st.integers(0, 24), st.integers(0, 24), st.integers(1, 5), st.data())
def test_keys_of_a_growing_prompt_are_those_of_its_pages(
    public: CacheScope | None, public_pages: int, num_pages: int, page_tokens: int, data: st.DataObject
) -> None:
    """In whatever order parts of a prompt are asked for, with known keys or without, each page has the key that is
    computed from its tokens and the key of the page before."""
    scope = PrefixScope(CacheScope(b"own"), public, public_pages)
    tokens = [97**5 * place % 2**32 for place in range(num_pages * page_tokens + page_tokens - 1)]
    expected: list[PageKey] = []
    for index in range(num_pages):
        own = tuple(tokens[index * page_tokens : (index + 1) * page_tokens])
        expected.append(page_key(scope, index, expected[-1] if expected else None, own))
    known: list[PageKey] = []

    for _ in range(3):
        end, start = data.draw(st.integers(0, len(tokens))), data.draw(st.integers(0, num_pages + 1))
        most = data.draw(st.integers(0, num_pages))
        of_part = expected[start : end // page_tokens]
        assert list(islice(page_keys(scope, tokens[:end], page_tokens, known, start), most)) == of_part[:most]
    assert list(page_keys(scope, tokens, page_tokens)) == expected
    assert list(page_keys(scope, tokens, page_tokens, known)) == expected
