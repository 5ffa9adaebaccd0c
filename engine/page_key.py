"""The name of a page by its content: a chain of digests over the scope and every token down to the page's end.

Two pages with one key hold the same KV, in whichever process and on whichever tier they lie.
Every part is framed by its length under a domain tag, so that no two chains can collide.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""32 bytes: SHA-256 of the scope and all tokens down to the end of the page."""

KEY_BYTES = 32

_ROOT_TAG = b"graftwork/page-root/1"
_PAGE_TAG = b"graftwork/page-key/1"


def first_key(scope: bytes) -> PageKey:
    """The key that the first page of a scope has for its parent: it stands for no tokens at all."""
    return PageKey(hashlib.sha256(_framed(_ROOT_TAG) + _framed(scope)).digest())


def next_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """The key of a page of `token_ids`, each in [0, 2^32), behind the page of `parent`."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return PageKey(hashlib.sha256(_PAGE_PREFIX + _framed(parent) + _framed(tokens)).digest())


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


_PAGE_PREFIX = _framed(_PAGE_TAG)
