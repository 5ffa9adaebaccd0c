"""Decides which requests may share cached KV: requests with the same cache scope.

A cache scope is a digest of the model, the KV layout, the isolation domain (usually one tenant) and the adapters. The
hash reads a fixed tag and then these parts, each preceded by its length. So two different lists of parts never give the
same input to the hash. Source: vllm#44701. There, an adapter's name and a salt were joined without lengths, so two
adapters could share a cache.
"""

import hashlib
import struct

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import RollingWindow
from graftwork.platform.ids import IsolationDomain

_TAG = b"graftwork/cache-scope/1"
_PUBLIC_TAG = b"graftwork/public-scope/1"
_WINDOW_TAG = b"graftwork/window-scope/1"


def framed_digest(tag: bytes, *parts: bytes) -> bytes:
    """Returns the SHA-256 of `tag` and `parts`, each preceded by its length in 8 bytes.

    Without the lengths, the parts (ab, c) and (a, bc) would give the same digest.
    """
    digest = hashlib.sha256()
    for part in (tag, *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class CacheScopes:
    """Computes the cache scopes of one engine. Two requests share cached KV only if they have the same cache scope.

    The engine's model, KV dtype and page layout are part of every scope.
    """

    def __init__(self, model_fingerprint: str, kv_layout: str) -> None:
        self._engine = (model_fingerprint.encode(), kv_layout.encode())

    def scope(self, domain: IsolationDomain, adapters: tuple[AdapterUse, ...]) -> CacheScope:
        """Returns the cache scope of requests from one isolation domain (usually one tenant) that use `adapters`.

        An empty `adapters` means the base model.
        """
        return CacheScope(framed_digest(_TAG, *self._engine, domain, *_parts(adapters)))

    def for_request(self, request: EngineRequest, page_tokens: int) -> PrefixScope:
        """Returns the cache scopes of a request's pages: one for public pages, and one for all others.

        The first `request.public_tokens` tokens of the prompt are public: all tenants may share their KV. A page is
        public if all its tokens are public. `page_tokens` is the number of tokens in a page. What a request with a rolling
        window computes is found only by requests with the same one.
        """
        own = self.scope(request.domain, request.adapters)
        public_pages = request.public_tokens // page_tokens
        return self.of_prompt(own, request.adapters, public_pages, request.sampling.rolling_window)

    def of_prompt(
        self, own: CacheScope, adapters: tuple[AdapterUse, ...], public_pages: int, window: RollingWindow | None
    ) -> PrefixScope:
        """Returns the cache scopes of a prompt: `own` is that of its domain and adapters. With a rolling window, no page
        is public.
        """
        if window is None:
            return self.with_public_pages(own, adapters, public_pages)
        bounds = struct.pack(">QQ", window.sinks, window.window)
        return PrefixScope(CacheScope(framed_digest(_WINDOW_TAG, own, bounds)), rolling=window)

    def with_public_pages(self, own: CacheScope, adapters: tuple[AdapterUse, ...], public_pages: int) -> PrefixScope:
        """Returns the cache scopes of a prompt whose first `public_pages` pages are shared by all tenants.

        All pages after these have the scope `own`.
        """
        if not public_pages:
            return PrefixScope(own)
        public = CacheScope(framed_digest(_PUBLIC_TAG, *self._engine, *_parts(adapters)))
        return PrefixScope(own, public, public_pages)


def _parts(adapters: tuple[AdapterUse, ...]) -> list[bytes]:
    return [part for use in adapters for part in (use.digest.encode(), struct.pack(">d", use.weight))]
