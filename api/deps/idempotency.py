"""`Idempotency-Key`: a POST that is sent twice runs once and gets the same answer twice.

Only successful answers are stored. A refused request frees its key. Work that continues without its client is stored
when it starts (`keep_started`), so that a client that reconnects finds the same work.
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
    """How one kind of route stores its answers and replays them."""

    kept: Callable[[bytes], bytes]
    """Removes secrets from a body before it is stored."""
    replay: Callable[[StoredReply], Awaitable[Response]]


class IdempotencyClaim:
    """A key that this request holds. It stores the first answer, or is freed."""

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
    """Store what `replay` needs to find the work. Does nothing for a request without a key."""
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
    """Return the answer of `handle`, or the stored answer of the same request.

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
        if not isinstance(response, EventStream):  # a stream is stored by `keep_started` only
            await claimed.keep(response.status_code, bytes(response.body))
        return response
    finally:
        await claimed.release()


async def _digest(request: Request) -> str:
    """Hash method, path and body. A multipart boundary is left out, because clients choose a new one each time."""
    body = await request.body()
    _, options = parse_options_header(request.headers.get("content-type"))
    if boundary := options.get(b"boundary"):
        body = body.replace(boundary, b"")
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    digest.update(body)
    return digest.hexdigest()
