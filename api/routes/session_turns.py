"""Defines the routes that start turns of a session, with a user's input or with tool outputs. Never runs a turn itself.

A turn continues when its client leaves. The client can reconnect and read the turn's events at `/events`. With
`cancel_on_disconnect`, the server cancels the turn when its client leaves.
"""

import asyncio
import json
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import ForSessions, InferenceKey, ReadingKey, resources_of
from graftwork.api.deps.route_classes import NativeRoute, keep_begun
from graftwork.api.http.request import unenforced_header
from graftwork.api.http.response_headers import degraded_header, tier_header
from graftwork.api.http.streaming import EventStream, until_disconnect, write_session_events
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.sessions import ToolOutputsBody, TurnBody, TurnOptions
from graftwork.platform.answers.sessions import GivenOutputs, Turn
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.idempotency import StoredReply
from graftwork.sessions.core.views import given_outputs_answer, turn_answer
from graftwork.sessions.turns.launcher import ToolOutputsResult
from graftwork.sessions.turns.running import TurnHandle

_BEGUN = "turn.begun"
"""Marks a stored answer that has only the id of a turn."""


class TurnRoute(NativeRoute):
    """A route that starts a turn, and supports `Idempotency-Key`.

    A repeated request gets the turn that the first request started, even if that turn still runs. If the turn failed
    through the server's fault, the repeated request starts another one.
    """

    def begun_body(self, session_id: SessionId, turn_id: TurnId) -> bytes:
        return json.dumps({"object": _BEGUN, "session_id": session_id, "turn_id": turn_id}).encode()

    async def replay(self, request: Request, reply: StoredReply) -> Response | None:
        kept = json.loads(reply.body)
        if kept.get("object") != _BEGUN:
            return await super().replay(request, reply)
        resources, principal = resources_of(request).sessions, request.state.principal
        turn = await resources.sessions.find_turn_of(principal, kept["session_id"], kept["turn_id"])
        if (await turn.stored()).failed_by_server:
            return None
        if (await request.json()).get("stream"):
            return read_stream(resources.work, principal, partial(write_session_events, turn.events()))
        ended = await until_disconnect(request, turn.result(), _leave_alone)
        return None if ended.failed_by_server else JSONResponse(turn_answer(ended).body())


router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"], route_class=TurnRoute)


@router.post("/turns", response_model=Turn, responses=also(400, 429, 504, stream="session"))
@takes_places
async def create_turn(
    session_id: str, body: TurnBody, request: Request, resources: ForSessions, principal: InferenceKey
) -> Response:
    """Start a turn with a user's input. With `stream`, send the turn's events while it runs."""
    turn = await resources.sessions.start_turn(
        principal.for_user(body.user),
        session_id,
        body.input,
        if_head=body.if_head,
        overrides=body.overrides(),
        tool_hints=body.hints(),
    )
    return await _answer(turn, request, body)


@router.post("/tool_outputs", response_model=Turn | GivenOutputs, responses=also(400, 429, 504, stream="session"))
async def send_tool_outputs(
    session_id: str, body: ToolOutputsBody, request: Request, resources: ForSessions, principal: InferenceKey
) -> Response:
    """Send tool outputs. If every call then has an output, the next turn starts, and the answer is that turn."""
    outputs = [output.model_dump() for output in body.outputs]
    answer = await resources.sessions.tool_outputs.send(
        principal.for_user(body.user), session_id, outputs, body.overrides()
    )
    if answer.turn is None:
        return JSONResponse(_outputs_answer(answer).body())
    return await _answer(answer.turn, request, body)


@router.get("/tool_outputs")
async def get_tool_outputs(session_id: str, resources: ForSessions, principal: ReadingKey) -> GivenOutputs:
    """Get the stored outputs of the session's last tool calls, and the calls that still need an output.

    If no call needs an output and no turn runs, the turn after these calls has failed. Then send an output again to
    start a new turn.
    """
    return _outputs_answer(await resources.sessions.tool_outputs.read(principal, session_id))


async def _answer(turn: TurnHandle, request: Request, options: TurnOptions) -> Response:
    """Waits for the turn and returns it, or streams its events.

    Raises the engine's error if the engine refuses the turn.
    """
    stream, leave = bool(options.stream), turn.cancel if options.cancel_on_disconnect else _leave_alone
    try:
        await until_disconnect(request, turn.admitted(), leave)
    except (ClientDisconnect, asyncio.CancelledError):
        keep_begun(request)
        raise
    keep_begun(request)
    headers = {
        **turn.rate_limit_headers,
        **unenforced_header(turn.unenforced),
        **degraded_header(turn.output_cap),
        **tier_header(turn.service_tier),
    }
    if stream:
        return EventStream(partial(write_session_events, turn.events()), on_end=leave, headers=headers)
    ended = await until_disconnect(request, turn.result(), leave)
    return JSONResponse(turn_answer(ended).body(), headers=headers)


def _outputs_answer(answer: ToolOutputsResult) -> GivenOutputs:
    return given_outputs_answer(answer.session, answer.outputs, answer.missing)


def _leave_alone() -> None:
    """Does nothing, so that the turn continues without its client."""
