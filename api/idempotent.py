"""`Idempotency-Key`: a POST that is sent twice is done once, and answered twice alike.

Only answers that went well are kept; a refused request frees its key.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request, Response
from python_multipart.multipart import parse_options_header

from graftwork.api.sse import EventStream
from graftwork.platform.idempotency import IdempotencyStore, StoredReply

HEADER = "idempotency-key"


@dataclass(frozen=True, slots=True)
class Replays:
    """How one kind of route keeps its answers and gives them again."""

    kept: Callable[[bytes], bytes]
    """What may be stored of a body: secrets are not."""
    replay: Callable[[StoredReply], Awaitable[Response]]


async def answer_once(
    request: Request, store: IdempotencyStore, owner: str, handle: Callable[[], Awaitable[Response]], replays: Replays
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
    answered = False
    try:
        response = await handle()
        body = response.kept if isinstance(response, EventStream) else bytes(response.body)
        if body is not None:
            await store.complete(claim, response.status_code, replays.kept(body))
            answered = True
        return response
    finally:
        if not answered:
            await store.abandon(claim)


async def _digest(request: Request) -> str:
    """Over method, path and body; a multipart body without its boundary, which clients draw anew each time."""
    body = await request.body()
    _, options = parse_options_header(request.headers.get("content-type"))
    if boundary := options.get(b"boundary"):
        body = body.replace(boundary, b"")
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    digest.update(body)
    return digest.hexdigest()
