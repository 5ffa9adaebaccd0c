"""Defines the routes `POST /v1/messages` and `POST /v1/messages/count_tokens` of Anthropic's API.

Translates the body to a chat completion request, runs it with the code for chat completions, and builds the answer in
Anthropic's form.
"""

from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from graftwork.api.anthropic.answer import anthropic_message, write_anthropic_events
from graftwork.api.anthropic.route import AnthropicRoute
from graftwork.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from graftwork.api.anthropic.translate import translate
from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.resources import CurrentRequestId, ForInference, InferenceKey
from graftwork.api.http.request import ignored_header, unenforced_header
from graftwork.api.http.streaming import EventStream, until_disconnect
from graftwork.api.inference.defaults import chat_with_defaults
from graftwork.api.inference.job import ResponseHead, start_inference
from graftwork.api.openapi.declare import also
from graftwork.api.routes.chat import chat_inference, chat_prompt
from graftwork.platform.answers.messages import Message
from graftwork.platform.answers.models import TokenCount

router = APIRouter(prefix="/v1/messages", tags=["inference"], route_class=AnthropicRoute)


@router.post("", response_model=Message, responses=also(404, 429, 504, stream="messages"))
@takes_places
async def create_message(
    body: MessagesRequest,
    request: Request,
    resources: ForInference,
    principal: InferenceKey,
    request_id: CurrentRequestId,
) -> Response:
    """Answer a conversation. With `stream`, send events while the model generates the answer."""
    translation = translate(body, request.headers, reasons=resources.generator.reasoning is not None)
    with translation.names.in_errors():
        with resources.accounting.take_places(principal) as places:
            inference = await chat_inference(translation.chat, resources, principal, request_id)
            inference = replace(inference, cache_ttl_s=translation.cache_ttl_s)
            job = await start_inference(resources, inference, places)
        unenforced = unenforced_header(inference.unenforced, translation.names)
        headers = {**job.headers, **unenforced, **ignored_header(translation.ignored)}
        head = ResponseHead.of("msg_", inference, resources)
        if body.stream:
            await until_disconnect(request, job.admitted(), job.abandon)
            source = partial(write_anthropic_events, head, job)
            return EventStream(source, on_end=job.abandon, headers=headers, as_generated=True)
        message = await until_disconnect(request, anthropic_message(head, job), job.abandon)
        return JSONResponse(message, headers=headers)


@router.post("/count_tokens", responses=also(404, 429))
async def count_tokens(
    body: CountTokensRequest, request: Request, response: Response, resources: ForInference, principal: InferenceKey
) -> TokenCount:
    """Count the tokens of a conversation's prompt. The server generates nothing and records no usage.

    The request counts in the tenant's limits of requests.
    """
    translation = translate(body, request.headers, reasons=resources.generator.reasoning is not None)
    response.headers.update(ignored_header(translation.ignored))
    resolved = await resources.resolve(principal, translation.chat.model, user=translation.chat.end_user)
    prompt = chat_prompt(chat_with_defaults(translation.chat, resolved.defaults), resources)
    async with resources.accounting.counted(principal.for_user(translation.chat.end_user)):
        return TokenCount(input_tokens=await resources.encoding.count(principal.tenant_id, prompt))
