"""`Idempotency-Key`: a POST that is sent twice is done once, and answered twice alike.

Only answers that went well are kept; a refused request frees its key. Work that goes on without its client is kept as
soon as it has begun (`keep_started`), so that a client that lost its connection meets its own work and not a second one.
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
    """How one kind of route keeps its answers and gives them again."""

    kept: Callable[[bytes], bytes]
    """What may be stored of a body: secrets are not."""
    replay: Callable[[StoredReply], Awaitable[Response]]


class IdempotencyClaim:
    """A key that this request holds: kept once, with the first answer that there is, or freed."""

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
    """Keep what the route's `replay` can find the work by; nothing happens for a request without a key."""
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
    """What `handle` answers, or what it answered to the same request before.

    Raises Conflict for a key that came with another request, or whose first request is still running.
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
        if not isinstance(response, EventStream):  # of which only `keep_started` can keep something
            await claimed.keep(response.status_code, bytes(response.body))
        return response
    finally:
        await claimed.release()


async def _digest(request: Request) -> str:
    """Over method, path and body; a multipart body without its boundary, which clients draw anew each time."""
    body = await request.body()
    _, options = parse_options_header(request.headers.get("content-type"))
    if boundary := options.get(b"boundary"):
        body = body.replace(boundary, b"")
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    digest.update(body)
    return digest.hexdigest()
