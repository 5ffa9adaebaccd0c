"""Defines what the routes of the Responses API share: field names in errors, idempotency, and the event stream.

Owns the translation of the names of session settings to the field names of the Responses API. Never runs a response.
For an `Idempotency-Key`, the server stores only the id of the response. With `store: false` it stores nothing.
For a streamed response, the server stores the id only if the response runs in the background. Any other streamed
response is cancelled when its connection breaks.
"""

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.deps.admission import IDEMPOTENCY_KEY
from graftwork.api.deps.direct_calls import Handler
from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import resources_of
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.request import BoundedRequest
from graftwork.api.http.streaming import PING_AFTER_S, Write, error_event, heartbeats, named_event
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.idempotency import StoredReply
from graftwork.sessions.responses.record import response_of

_NAMES = (
    (re.compile(r"\b(tools\[\d+\])\.(function|custom)\b"), r"\1"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bsampling\.max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bsampling\."), ""),
    (re.compile(r"^messages\b"), "input"),
)
"""Pairs of a pattern for the name of a session setting, and the field name in the Responses API that replaces it."""


class ResponsesRoute(OpenAiRoute):
    """A route of the Responses API. POST requests support `Idempotency-Key`, because they create something."""

    is_idempotent = True

    async def run(self, request: BoundedRequest, handle: Handler) -> Response:
        if IDEMPOTENCY_KEY in request.headers and await _asks_to_store_nothing(request):
            return await handle(request)
        return await super().run(request, handle)

    def storable_body(self, body: bytes) -> bytes:
        answer = json.loads(body)
        return _stored_body(answer["id"]) if _is_response(answer) else body

    def begun_body(self, session_id: SessionId, turn_id: TurnId) -> bytes:
        return _stored_body(response_of(turn_id))

    async def replay(self, request: Request, reply: StoredReply) -> Response | None:
        """Answers a repeated request with the response that the first request created, in its current state.

        If the first request asked for a stream, answers with the response's events, from the first event.
        """
        kept, responses, principal = (
            json.loads(reply.body),
            resources_of(request).sessions.responses,
            request.state.principal,
        )
        if not _is_response(kept):
            return await super().replay(request, reply)
        if await responses.failed_by_server(principal, kept["id"]):
            return None
        if await _asks_to_stream(request):
            run = await responses.find(principal, kept["id"])
            work = resources_of(request).sessions.work
            return read_stream(work, principal, partial(write_response_events, run.events()))
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
    """Returns whether the body has `store: false`."""
    return (await _fields(request)).get("store") is False


async def _asks_to_stream(request: Request) -> bool:
    return (await _fields(request)).get("stream") is True


async def _fields(request: Request) -> dict[str, Any]:
    """Returns the fields of the body. Returns none for an invalid body, which the handler refuses."""
    body = await request.json() if await request.body() else None
    return body if isinstance(body, dict) else {}


def _stored_body(response_id: str) -> bytes:
    """Makes the body that the server stores for a response's `Idempotency-Key`."""
    return json.dumps({"object": "response", "id": response_id}).encode()


def _is_response(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("object") == "response"


@contextmanager
def named_tools(paths: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Replaces the numbers of tools in errors with the paths of the tools in the request, while the block runs.

    `paths` has the path of each tool. A number differs from the path after a tool that is left out, and in a namespace.
    Gives the block the function that replaces the numbers in a text.
    """

    def path_of(found: re.Match[str]) -> str:
        index = int(found[1])
        return paths[index] if index < len(paths) else found[0]

    def rename(text: str) -> str:
        return _TOOL_NUMBER.sub(path_of, text)

    try:
        yield rename
    except (InvalidRequest, ValidationFailed) as error:
        param = None if error.param is None else rename(error.param)
        raise type(error)(rename(error.message), param=param, code=error.code, details=error.details) from error


_TOOL_NUMBER = re.compile(r"\btools\[(\d+)\]")


def responses_names(text: str) -> str:
    """Replaces the names of session settings in an error's text with the field names of the Responses API."""
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


_COMMENT = b": still here\n\n"


async def write_response_events(
    events: AsyncGenerator[dict[str, Any], None], write: Write, silence_s: float = PING_AFTER_S
) -> None:
    """Writes all events of one response of the Responses API with `write`.

    The last event of the response ends the stream, without `[DONE]`. If `events` raises an error, the last event is an
    `error`.
    After each `silence_s` seconds without an event, writes a comment, which clients ignore.
    """
    async with heartbeats(write, _COMMENT, silence_s) as write_event, aclosing(events):
        try:
            async for event in events:
                await write_event(named_event(event["type"], event))
        except GraftworkError as error:
            await write_event(error_event(error))
