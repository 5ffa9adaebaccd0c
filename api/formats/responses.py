"""Defines what the routes of the Responses API share: field names in errors, idempotency, and the event stream.

Owns the translation of the names of session settings to this API's field names. Never runs a response.
For an `Idempotency-Key`, the server stores only the id of the response. With `store: false` it stores nothing. For a
streamed answer, it stores the id only if the response runs in the background, because the server cancels any other
response when its connection breaks.
"""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.deps.resources import resources_of
from graftwork.api.deps.route_classes import HEADER, Handler, OpenAiRoute
from graftwork.api.http.streaming import PING_AFTER_S, EventStream, Write, error_event, heartbeats, named_event
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed
from graftwork.platform.tenancy.idempotency import StoredReply

_NAMES = (
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bsampling\.max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bsampling\."), ""),
    (re.compile(r"^messages\b"), "input"),
)
"""Pairs of a pattern for the name of a session setting, and the field name in the Responses API that replaces it."""


class ResponsesRoute(OpenAiRoute):
    """A route of the Responses API. Its POSTs create something, so they support `Idempotency-Key`."""

    is_idempotent = True

    async def run(self, request: Request, handle: Handler) -> Response:
        if HEADER in request.headers and await _asks_to_store_nothing(request):
            return await handle(request)
        return await super().run(request, handle)

    def storable_body(self, body: bytes) -> bytes:
        answer = json.loads(body)
        kept = {name: answer[name] for name in ("object", "id", "stream") if name in answer}
        return json.dumps(kept).encode() if _is_response(answer) else body

    async def replay(self, request: Request, reply: StoredReply) -> Response:
        """Returns the current state of a stored response, or its events if the first request was a stream."""
        kept, responses, principal = (
            json.loads(reply.body),
            resources_of(request).sessions.responses,
            request.state.principal,
        )
        if not _is_response(kept):
            return await super().replay(request, reply)
        if kept.get("stream"):
            run = await responses.find(principal, kept["id"])
            return EventStream(partial(write_response_events, run.events()))
        return JSONResponse(await responses.get(principal, kept["id"]))

    def as_route_error(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        renamed = type(error)(
            responses_names(error.message),
            param=None if error.param is None else responses_names(error.param),
            code=error.code,
            details=error.details,
        )
        return super().as_route_error(renamed)


async def _asks_to_store_nothing(request: Request) -> bool:
    """Returns whether the body has `store: false`. Returns False for an invalid body, which the handler refuses."""
    if not await request.body():
        return False
    body = await request.json()
    return isinstance(body, dict) and body.get("store") is False


def _is_response(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("object") == "response"


def responses_names(text: str) -> str:
    """Replaces names of session settings in a text with the names of the Responses API."""
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


_COMMENT = b": still here\n\n"


async def write_response_events(
    events: AsyncGenerator[dict[str, Any], None], write: Write, silence_s: float = PING_AFTER_S
) -> None:
    """Writes all events of the response with `write`.

    The stream ends with the response's last event, without `[DONE]`.
    """
    async with heartbeats(write, _COMMENT, silence_s) as write_event, aclosing(events):
        try:
            async for event in events:
                await write_event(named_event(event["type"], event))
        except GraftworkError as error:
            await write_event(error_event(error))
