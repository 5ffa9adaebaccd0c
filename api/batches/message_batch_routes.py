"""Defines the routes for batches of messages, in Anthropic's form."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from graftwork.api.anthropic.route import AnthropicRoute
from graftwork.api.batches.bodies import MessageBatchBody
from graftwork.api.batches.endpoints import MESSAGES
from graftwork.api.batches.file_routes import content_response
from graftwork.api.batches.views import message_batch_answer
from graftwork.api.deps.resources import ForBatches, InferenceKey, ReadingKey, resources_of
from graftwork.api.http.pagination import DEFAULT_LIMIT, AfterCursor
from graftwork.api.http.request import BoundedRequest, JsonRequest
from graftwork.api.openapi.declare import also
from graftwork.platform.answers import files as answers
from graftwork.platform.batches.batch import Batch, BatchForm
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.principals import Principal

RESULTS = "application/x-jsonl"
MAX_LIMIT = 1000
_BODY_BYTES = 32 * 1024 * 1024


class _LargeJsonRequest(JsonRequest):
    """A request whose JSON body has many requests."""

    limit_bytes = _BODY_BYTES


class MessageBatchRoute(AnthropicRoute):
    """A route for batches of messages. POST requests support `Idempotency-Key`, because they create something."""

    is_idempotent = True

    def bounded(self, request: Request) -> BoundedRequest:
        """Returns the same request with the limits for the bodies of this class."""
        principal: Principal = request.state.principal
        parse = partial(resources_of(request).server.json.parse, principal.tenant_id)
        return _LargeJsonRequest(request.scope, request.receive, parse)


router = APIRouter(prefix="/v1/messages/batches", tags=["batches"], route_class=MessageBatchRoute)


@router.post("", responses=also(429))
async def create_message_batch(
    body: MessageBatchBody, request: Request, resources: ForBatches, principal: InferenceKey
) -> answers.MessageBatch:
    """Create a batch of requests to `/v1/messages`. They run when nothing else does, within 24 hours."""
    lines = list(body.lines())
    most = resources.batches.limits.max_lines
    if len(lines) > most:
        raise InvalidRequest(f"requests: a batch has at most {most} of them: split it.", param="requests")
    return _shown(request, await resources.batches.create_messages(principal, MESSAGES, lines))


@router.get("")
async def list_message_batches(
    request: Request,
    resources: ForBatches,
    principal: ReadingKey,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after_id: AfterCursor = None,
    before_id: AfterCursor = None,
) -> answers.MessageBatchPage:
    """List the batches of messages, the newest first: those after `after_id`, or the last ones before `before_id`."""
    is_before = before_id is not None
    order = Order.ASCENDING if is_before else Order.DESCENDING
    wanted = PageRequest(limit, before_id if is_before else after_id, order)
    found = await resources.batches.list(principal.scope(), BatchForm.ANTHROPIC, wanted)
    newest_first = found.items[::-1] if is_before else found.items
    data = tuple(_shown(request, batch) for batch in newest_first)
    ends = (data[0].id, data[-1].id) if data else (None, None)
    return answers.MessageBatchPage(data=data, has_more=found.has_more, first_id=ends[0], last_id=ends[1])


@router.get("/{message_batch_id}")
async def get_message_batch(
    message_batch_id: str, request: Request, resources: ForBatches, principal: ReadingKey
) -> answers.MessageBatch:
    found = await resources.batches.get(principal.scope(), message_batch_id, BatchForm.ANTHROPIC)
    return _shown(request, found)


@router.post("/{message_batch_id}/cancel")
async def cancel_message_batch(
    message_batch_id: str, request: Request, resources: ForBatches, principal: InferenceKey
) -> answers.MessageBatch:
    """Cancel a batch. Requests that run are still answered, and the others are not begun."""
    found = await resources.batches.cancel(principal.scope(), message_batch_id, BatchForm.ANTHROPIC)
    return _shown(request, found)


@router.delete("/{message_batch_id}", responses=also(409))
async def delete_message_batch(
    message_batch_id: str, resources: ForBatches, principal: InferenceKey
) -> answers.MessageBatchDeleted:
    """Delete a batch that has ended, with its results."""
    await resources.batches.delete(principal.scope(), message_batch_id, BatchForm.ANTHROPIC)
    return answers.MessageBatchDeleted(id=message_batch_id)


@router.get(
    "/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses={200: {"content": {RESULTS: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_message_batch_results(
    message_batch_id: str, resources: ForBatches, principal: ReadingKey
) -> StreamingResponse:
    """Download the results of a batch that has ended: one in JSON a line, by `custom_id`."""
    scope = principal.scope()
    file = await resources.batches.results(scope, message_batch_id, BatchForm.ANTHROPIC)
    return content_response(await resources.files.open(scope, file.id), file.size_bytes, RESULTS)


def _shown(request: Request, batch: Batch) -> answers.MessageBatch:
    url = str(request.base_url).rstrip("/") + f"{router.prefix}/{batch.id}/results"
    return message_batch_answer(batch, url)
