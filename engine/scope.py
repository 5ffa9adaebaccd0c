"""The identity of cached KV: everything that must agree before two requests may share a page.

Each part is framed by its length and the whole by a domain tag, so that no two lists of parts can collide
(vllm#44701: an adapter's name and a salt, joined without frames, named each other's cache).
"""

import hashlib
import struct

from graftwork.engine.prefix_tree import CacheScope
from graftwork.engine.request import AdapterUse
from graftwork.platform.ids import IsolationDomain

_TAG = b"graftwork/cache-scope/1"


def framed_digest(tag: bytes, *parts: bytes) -> bytes:
    """SHA-256 over a tag and parts, each preceded by its length."""
    digest = hashlib.sha256()
    for part in (tag, *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class ScopeMaker:
    """Makes the scopes of one engine: its model, its KV dtype and its page layout are the same for all."""

    def __init__(self, model_fingerprint: str, kv_layout: str) -> None:
        self._engine = (model_fingerprint.encode(), kv_layout.encode())

    def scope(self, isolation: IsolationDomain, adapters: tuple[AdapterUse, ...]) -> CacheScope:
        """The scope of one isolation domain under one adapter or mixture; the base model is the empty mixture."""
        uses = [part for use in adapters for part in (use.digest.encode(), struct.pack(">d", use.weight))]
        return CacheScope(framed_digest(_TAG, *self._engine, isolation, *uses))
