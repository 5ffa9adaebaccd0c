"""Tests of the chain of page keys."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.prefix_keys import PageKey, child_key, root_key

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
