"""The identity of cached KV: everything that must agree before two requests may share a page.

Each part is framed by its length and the whole by a domain tag, so that no two lists of parts can collide
(vllm#44701: an adapter's name and a salt, joined without frames, named each other's cache).
"""

import hashlib
import struct

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.platform.ids import IsolationDomain

_TAG = b"graftwork/cache-scope/1"
_PUBLIC_TAG = b"graftwork/public-scope/1"


def framed_digest(tag: bytes, *parts: bytes) -> bytes:
    """SHA-256 over a tag and parts, each preceded by its length."""
    digest = hashlib.sha256()
    for part in (tag, *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class CacheScopes:
    """Makes the scopes of one engine: its model, its KV dtype and its page layout are the same for all."""

    def __init__(self, model_fingerprint: str, kv_layout: str) -> None:
        self._engine = (model_fingerprint.encode(), kv_layout.encode())

    def scope(self, isolation: IsolationDomain, adapters: tuple[AdapterUse, ...]) -> CacheScope:
        """The scope of one isolation domain under one adapter or mixture; the base model is the empty mixture."""
        return CacheScope(framed_digest(_TAG, *self._engine, isolation, *_parts(adapters)))

    def of(self, request: EngineRequest, page_tokens: int) -> PrefixScope:
        """Where a request's pages may be shared; a page that is public in part only is not."""
        own = self.scope(request.isolation, request.adapters)
        return self.within(own, request.adapters, request.public_tokens // page_tokens)

    def within(self, own: CacheScope, adapters: tuple[AdapterUse, ...], public_pages: int) -> PrefixScope:
        """A scope whose first pages every domain may share."""
        if not public_pages:
            return PrefixScope(own)
        public = CacheScope(framed_digest(_PUBLIC_TAG, *self._engine, *_parts(adapters)))
        return PrefixScope(own, public, public_pages)


def _parts(adapters: tuple[AdapterUse, ...]) -> list[bytes]:
    return [part for use in adapters for part in (use.digest.encode(), struct.pack(">d", use.weight))]
