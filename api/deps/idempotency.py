"""Implements `Idempotency-Key`: a POST that arrives twice runs once, and both requests get the same answer.

Stores only successful answers. A request that fails frees its key. Some work continues after its client leaves. Such
work is stored when it starts (`keep_started`), so that a client that reconnects finds it again.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request, Response
from python_multipart.multipart import parse_options_header

from graftwork.api.http.sse import EventStream
from graftwork.platform.tenancy.idempotency import Attempt, IdempotencyStore, StoredReply

HEADER = "idempotency-key"


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """Defines how one kind of route stores its answers, and how it sends a stored answer again."""

    kept: Callable[[bytes], bytes]
    """Returns the part of an answer's body that the server may store, without secrets."""
    replay: Callable[[StoredReply], Awaitable[Response]]


class IdempotencyClaim:
    """Holds the idempotency key of a running request. The key stores the first answer, or becomes free again."""

    def __init__(self, store: IdempotencyStore, attempt: Attempt, kept: Callable[[bytes], bytes]) -> None:
        self._store = store
        self._attempt = attempt
        self._kept = kept
        self._is_kept = False

    async def keep(self, status: int, body: bytes) -> None:
        if not self._is_kept:
            self._is_kept = True
            await self._store.complete(self._attempt, status, self._kept(body))

    async def release(self) -> None:
        if not self._is_kept:
            await self._store.abandon(self._attempt)


async def keep_started(request: Request, status: int, body: bytes) -> None:
    """Store the body that `replay` needs to find the work again. Do nothing for a request without a key."""
    claimed: IdempotencyClaim | None = getattr(request.state, "claimed_key", None)
    if claimed is not None:
        await claimed.keep(status, body)


async def answer_once(
    request: Request,
    store: IdempotencyStore,
    owner: str,
    handle: Callable[[], Awaitable[Response]],
    replays: ReplayRules,
) -> Response:
    """Return the answer of `handle`. If this request was answered before, return the stored answer.

    Raises Conflict if the key belongs to a different request, or if the first request with this key still runs.
    """
    key = request.headers.get(HEADER)
    if key is None or request.method != "POST":
        return await handle()
    claim = await store.begin(owner, key, await _digest(request))
    if isinstance(claim, StoredReply):
        response = await replays.replay(claim)
        response.headers["idempotent-replayed"] = "true"
        return response
    request.state.claimed_key = claimed = IdempotencyClaim(store, claim, replays.kept)
    try:
        response = await handle()
        if not isinstance(response, EventStream):  # only `keep_started` stores a stream
            await claimed.keep(response.status_code, bytes(response.body))
        return response
    finally:
        await claimed.release()


async def _digest(request: Request) -> str:
    """Hash the method, path and body. Leave out a multipart boundary, because clients choose a new one each time."""
    body = await request.body()
    _, options = parse_options_header(request.headers.get("content-type"))
    if boundary := options.get(b"boundary"):
        body = body.replace(boundary, b"")
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    digest.update(body)
    return digest.hexdigest()
