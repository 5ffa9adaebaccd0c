"""Turns of a session: those that a user starts, and those that tool outputs start.

A turn belongs to its session, not to the connection that started it. A client that reconnects finds it finished, or
follows it at `/events`. With `cancel_on_disconnect`, the turn is cancelled when its client leaves.
"""

import asyncio
import json
from functools import partial
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from graftwork.api.deps.dependencies import ForSessions, InferenceKey
from graftwork.api.deps.idempotency import keep_started
from graftwork.api.deps.resources import resources_of
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.formats.sessions import write_session_events
from graftwork.api.http.disconnect import until_disconnect
from graftwork.api.http.headers import unenforced_header
from graftwork.api.http.sse import EventStream
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.sessions import ToolOutputsBody, TurnBody, TurnOptions
from graftwork.platform.answers.sessions import GivenOutputs, Turn
from graftwork.platform.tenancy.idempotency import StoredReply
from graftwork.sessions.core.views import given_outputs_answer, turn_answer
from graftwork.sessions.turns.handle import TurnHandle
from graftwork.sessions.turns.tool_outputs import ToolOutputsResult

_BEGUN = "turn.begun"
"""The kind of a stored answer that names a turn and says whether to stream it."""


class TurnRoute(NativeRoute):
    """Replays a stored turn, and follows it if it still runs."""

    async def replay(self, request: Request, reply: StoredReply) -> Response:
        kept = json.loads(reply.body)
        if kept.get("object") != _BEGUN:
            return await super().replay(request, reply)
        sessions = resources_of(request).sessions.sessions
        turn = await sessions.find_turn_of(request.state.principal, kept["session_id"], kept["turn_id"])
        if kept["stream"]:
            return EventStream(partial(write_session_events, turn.events()))
        return JSONResponse(turn_answer(await until_disconnect(request, turn.result(), _leave_alone)).body())


router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"], route_class=TurnRoute)


@router.post("/turns", response_model=Turn, responses=also(400, 429, stream="session"))
async def create_turn(
    session_id: str, body: TurnBody, request: Request, resources: ForSessions, principal: InferenceKey
) -> Response:
    """Start a turn with a user's input. With `stream`, its events are sent as they happen."""
    turn = await resources.sessions.start_turn(
        principal,
        session_id,
        body.input,
        if_head=body.if_head,
        overrides=body.overrides(),
        tool_hints=body.hints(),
    )
    return await _answer(turn, request, body)


@router.post("/tool_outputs", response_model=Turn | GivenOutputs, responses=also(400, 429, stream="session"))
async def send_tool_outputs(
    session_id: str, body: ToolOutputsBody, request: Request, resources: ForSessions, principal: InferenceKey
) -> Response:
    """Send tool outputs. The last missing output starts the next turn, which is the answer."""
    outputs = [output.model_dump() for output in body.outputs]
    answer = await resources.sessions.tool_outputs.send(principal, session_id, outputs)
    if answer.turn is None:
        return JSONResponse(_outputs_answer(answer).body())
    return await _answer(answer.turn, request, body)


@router.get("/tool_outputs")
async def get_tool_outputs(session_id: str, resources: ForSessions, principal: InferenceKey) -> GivenOutputs:
    """Get the stored outputs of the calls that the history ends in, and the calls that still wait.

    If no call waits and no turn runs, the turn failed: send an output again to start another turn.
    """
    return _outputs_answer(await resources.sessions.tool_outputs.read(principal, session_id))


async def _answer(turn: TurnHandle, request: Request, options: TurnOptions) -> Response:
    """Answer with a turn. Raises the error that refused it before the engine accepted it."""
    stream, leave = bool(options.stream), turn.cancel if options.cancel_on_disconnect else _leave_alone
    kept = {"object": _BEGUN, "session_id": turn.session_id, "turn_id": turn.turn_id, "stream": stream}
    begun = json.dumps(kept).encode()
    try:
        await until_disconnect(request, turn.admitted(), leave)
    except (ClientDisconnect, asyncio.CancelledError):
        await keep_started(request, HTTPStatus.OK, begun)
        raise
    await keep_started(request, HTTPStatus.OK, begun)
    headers = {**turn.rate_limit_headers, **unenforced_header(turn.unenforced)}
    if stream:
        return EventStream(partial(write_session_events, turn.events()), on_end=leave, headers=headers)
    ended = await until_disconnect(request, turn.result(), leave)
    return JSONResponse(turn_answer(ended).body(), headers=headers)


def _outputs_answer(answer: ToolOutputsResult) -> GivenOutputs:
    return given_outputs_answer(answer.session, answer.outputs, answer.missing)


def _leave_alone() -> None:
    """A turn continues without its readers."""
