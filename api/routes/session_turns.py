"""Turns of a session: a user's, and those that tool outputs start.

A turn belongs to its session, not to the connection that started it: a client that leaves finds it done, or follows it
at `/events`.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.dependencies import AppResources, InferenceKey
from graftwork.api.disconnects import until_disconnect
from graftwork.api.guarded_route import NativeRoute
from graftwork.api.resources import resources_of
from graftwork.api.schemas.sessions import ToolOutputsBody, TurnBody
from graftwork.api.session_stream import session_events
from graftwork.api.sse import EventStream
from graftwork.platform.idempotency import StoredReply
from graftwork.sessions.bodies import tool_output_body, turn_body
from graftwork.sessions.events import SessionEvent
from graftwork.sessions.running_turn import RunningTurn
from graftwork.sessions.service import ToolOutputsAnswer

_STREAMED = "turn.stream"
"""What is kept of a streamed answer under an Idempotency-Key: which events it was made of."""


class TurnRoute(NativeRoute):
    """A streamed turn that is asked for again is streamed again, from the stored events."""

    async def replay(self, request: Request, reply: StoredReply) -> Response:
        kept = json.loads(reply.body)
        if kept.get("object") != _STREAMED:
            return await super().replay(request, reply)
        sessions = resources_of(request).sessions
        events = await sessions.events(request.state.principal, kept["session_id"], kept["after"])
        return EventStream(session_events(_of_turn(events, kept["turn_id"])))


router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"], route_class=TurnRoute)


@router.post("/turns")
async def create_turn(
    session_id: str, body: TurnBody, request: Request, resources: AppResources, principal: InferenceKey
) -> Response:
    """Say something and have it answered; with `stream` as it is made."""
    turn = await resources.sessions.start_turn(
        principal, session_id, body.input, if_head=body.if_head, overrides=body.overrides()
    )
    return await _answer(turn, request, stream=bool(body.stream))


@router.post("/tool_outputs")
async def send_tool_outputs(
    session_id: str, body: ToolOutputsBody, request: Request, resources: AppResources, principal: InferenceKey
) -> Response:
    """Answer calls; the last missing one starts the next turn and answers with it, streamed if asked for."""
    outputs = [output.model_dump() for output in body.outputs]
    answer = await resources.sessions.tool_outputs(principal, session_id, outputs)
    if answer.turn is None:
        return JSONResponse(_awaiting_body(answer))
    return await _answer(answer.turn, request, stream=bool(body.stream))


async def _answer(turn: RunningTurn, request: Request, *, stream: bool) -> Response:
    """Raises what refused the turn before the engine took it. Leaving early leaves the turn alone."""
    headers = dict(turn.rate_limit_headers)
    if not stream:
        ended = await until_disconnect(request, turn.result(), _leave_alone)
        await turn.admitted()
        return JSONResponse(turn_body(ended), headers=headers)
    await until_disconnect(request, turn.admitted(), _leave_alone)
    events = turn.events()
    first = await anext(events, None)
    after = 0 if first is None else first.seq - 1
    kept = {"object": _STREAMED, "session_id": turn.session_id, "turn_id": turn.turn_id, "after": after}
    return EventStream(session_events(_with_first(first, events)), headers=headers, kept=json.dumps(kept).encode())


async def _with_first(
    first: SessionEvent | None, rest: AsyncGenerator[SessionEvent, None]
) -> AsyncGenerator[SessionEvent, None]:
    if first is not None:
        yield first
    async for event in rest:
        yield event


async def _of_turn(events: AsyncGenerator[SessionEvent, None], turn_id: str) -> AsyncGenerator[SessionEvent, None]:
    async for event in events:
        if event.turn_id != turn_id:
            return
        yield event
        if event.is_terminal:
            return


def _awaiting_body(answer: ToolOutputsAnswer) -> dict[str, Any]:
    """What was stored, and what the session still waits for."""
    session = answer.session
    awaited = [call for call in session.ledger if call.call_id in answer.missing]
    return {
        "object": "tool_outputs",
        "session_id": session.session_id,
        "status": session.status.value,
        "outputs": [tool_output_body(output) for output in answer.outputs],
        "tool_calls": [{"call_id": call.call_id, "name": call.name, "arguments": call.arguments} for call in awaited],
    }


def _leave_alone() -> None:
    """A turn goes on without its readers."""
