"""Defines the routes of OpenAI's Responses API.

A background response continues without its client. Any other response ends when its client leaves.
"""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import ForSessions, InferenceKey, ReadingKey, SessionResources
from graftwork.api.deps.route_classes import keep_begun
from graftwork.api.formats.responses import ResponsesRoute, named_tools, responses_names, write_response_events
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.http.request import ignored_header, unenforced_header
from graftwork.api.http.response_headers import degraded_header
from graftwork.api.http.streaming import EventStream, until_disconnect
from graftwork.api.inference.request import served_tier
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.responses import ResponseRequest
from graftwork.platform.answers import responses as answers
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.sessions import Item
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.core.views import item_answer
from graftwork.sessions.responses.handle import ResponseHandle

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=ResponsesRoute)

StartingAfter = Annotated[int | None, Query(ge=-1, lt=1 << 62)]


@router.post("", response_model=answers.ResponseState, responses=also(404, 409, 429, 504, stream="responses"))
@takes_places
async def create_response(
    body: ResponseRequest, request: Request, resources: ForSessions, principal: InferenceKey
) -> Response:
    """Create a response. With `stream`, send events while the model generates it.

    With `background`, answer at once, and generate the response afterwards.
    """
    order = body.order(served_tier(principal, body.service_tier))
    with named_tools(order.tool_paths) as name_of:
        run = await resources.responses.create(principal, order)
    unenforced = unenforced_header(run.unenforced, lambda place: responses_names(name_of(place)))
    headers = {
        **run.rate_limit_headers,
        **unenforced,
        **degraded_header(run.output_cap),
        **ignored_header((*order.ignored, *run.left_out)),
    }
    release = partial(_release, resources, run)
    if body.background and not body.stream:
        return JSONResponse(run.queued_body(), headers=headers)
    if not body.stream:
        return JSONResponse(await until_disconnect(request, _answer(run), release), headers=headers)
    if body.background:
        keep_begun(request)
    else:
        await until_disconnect(request, run.admitted(), release)
    return EventStream(partial(write_response_events, run.events()), on_end=release, headers=headers)


@router.post("/input_tokens", responses=also(404, 429))
async def count_input_tokens(
    body: ResponseRequest, resources: ForSessions, principal: InferenceKey
) -> answers.InputTokens:
    """Count the tokens of the prompt that a response would have. The server generates nothing and stores nothing.

    The request counts in the tenant's limits of requests.
    """
    order = body.order(served_tier(principal, body.service_tier))
    with named_tools(order.tool_paths):
        return answers.InputTokens(input_tokens=await resources.responses.count_input(principal, order))


@router.get("/{response_id}", response_model=answers.ResponseState, responses=also(stream="responses"))
async def get_response(
    response_id: str,
    resources: ForSessions,
    principal: ReadingKey,
    stream: bool = False,
    starting_after: StartingAfter = None,
) -> Response:
    """Get a response. With `stream`, send its events with numbers above `starting_after`."""
    if not stream:
        if starting_after is not None:
            raise InvalidRequest("starting_after is for streams: send stream=true with it.", param="starting_after")
        return JSONResponse(await resources.responses.get(principal, response_id))
    run = await resources.responses.find(principal, response_id)
    events = run.events(-1 if starting_after is None else starting_after)
    return read_stream(resources.work, principal, partial(write_response_events, events))


@router.delete("/{response_id}")
async def delete_response(response_id: str, resources: ForSessions, principal: InferenceKey) -> answers.ResponseDeleted:
    """Delete a response. The server keeps items that later responses need."""
    await resources.responses.delete(principal, response_id)
    return answers.ResponseDeleted(id=response_id)


@router.post("/{response_id}/cancel", response_model=answers.ResponseState)
async def cancel_response(response_id: str, resources: ForSessions, principal: InferenceKey) -> Response:
    """Cancel a running response. If the response has ended, return it unchanged."""
    return JSONResponse(await resources.responses.cancel(principal, response_id))


@router.get("/{response_id}/input_items")
async def list_response_input_items(
    response_id: str, resources: ForSessions, principal: ReadingKey, page: PageQuery
) -> Page[Item]:
    """List the input items of a response."""
    return page_answer(await resources.responses.input_items(principal, response_id, page), item_answer)


async def _answer(run: ResponseHandle) -> dict[str, Any]:
    await run.admitted()
    body = await run.result()
    await run.release()
    return body


def _release(resources: SessionResources, run: ResponseHandle) -> None:
    resources.tasks.start(run.release(), f"letting go of {run.record.response_id}")
