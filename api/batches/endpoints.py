"""Answers one line of a batch, as the route of its endpoint would answer the same body.

    the body ──► checked ──► InferenceRequest of the tier flex ──► InferenceJob with a HeldAccount ──► the answer's body

Owns which endpoints a batch may have, and how each checks a body and builds an answer. Requests to `/v1/responses` are
turns, see `response_lines.py`. Never stores anything: the runner stores the answer together with the usage record.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from starlette.datastructures import Headers

from graftwork.api.anthropic.answer import anthropic_message
from graftwork.api.anthropic.schemas import MessagesRequest
from graftwork.api.anthropic.translate import translate, with_anthropic_fields
from graftwork.api.batches.line_work import Json, LineWork, refuse_field
from graftwork.api.batches.response_lines import ResponseLines
from graftwork.api.deps.resources import InferenceResources
from graftwork.api.formats.completions import chat_completion, completion
from graftwork.api.http.validation import as_invalid_request, checked_body
from graftwork.api.inference.job import InferenceJob, ResponseHead, start_inference
from graftwork.api.routes.chat import chat_form, chat_inference
from graftwork.api.routes.completions import completion_form, completion_inference
from graftwork.api.routes.embeddings import AT_ONCE, check_dimensions, embedding_list, embeddings_inference
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.api.schemas.completions import CompletionRequest
from graftwork.api.schemas.embeddings import EmbeddingsRequest
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.generation.generator import GenerationFinished

_TIER = "flex"
_ANTHROPIC_TIER = "batch"
_NO_HEADERS = Headers({})
_NO_STREAM = "A request of a batch has no stream"

Answer = Callable[[InferenceResources, LineWork], Awaitable[Json]]
"""Answers a line. Raises a GraftworkError."""


async def _answer_chat(resources: InferenceResources, work: LineWork) -> Json:
    body = checked_body(ChatCompletionRequest, work.body)
    refuse_field("stream", body.stream, _NO_STREAM)
    with resources.accounting.take_places(work.principal, body.n or 1) as places:
        inference = await chat_inference(body, resources, work.principal, work.request_id)
        form = chat_form(body, inference)
        job = await start_inference(resources, inference, places, work.held)
    answers = await _answers(job)
    return chat_completion(ResponseHead.of("chatcmpl-", inference, resources), answers, job, form)


async def _answer_completion(resources: InferenceResources, work: LineWork) -> Json:
    body = checked_body(CompletionRequest, work.body)
    refuse_field("stream", body.stream, _NO_STREAM)
    with resources.accounting.take_places(work.principal, len(body.prompt) * (body.n or 1)) as places:
        inference = await completion_inference(body, resources, work.principal, work.request_id)
        form = completion_form(body, resources, inference)
        job = await start_inference(resources, inference, places, work.held)
    answers = await _answers(job)
    return completion(ResponseHead.of("cmpl-", inference, resources), form, answers, job)


async def _answer_message(resources: InferenceResources, work: LineWork) -> Json:
    body = checked_body(MessagesRequest, work.body)
    refuse_field("stream", body.stream, _NO_STREAM)
    translation = translate(body, _NO_HEADERS, reasons=resources.generator.reasoning is not None)
    with translation.names.in_errors(), resources.accounting.take_places(work.principal) as places:
        inference = await chat_inference(translation.chat, resources, work.principal, work.request_id)
        job = await start_inference(resources, inference, places, work.held)
    try:
        message = await anthropic_message(ResponseHead.of("msg_", inference, resources), job)
    finally:
        job.abandon()
    message["usage"] |= {"service_tier": _ANTHROPIC_TIER}
    return message


async def _answer_embeddings(resources: InferenceResources, work: LineWork) -> Json:
    body = checked_body(EmbeddingsRequest, work.body)
    check_dimensions(body, resources)
    with resources.accounting.take_places(work.principal, min(len(body.input), AT_ONCE)) as places:
        inference = await embeddings_inference(body, resources, work.principal, work.request_id)
        job = await start_inference(resources, inference, places, work.held)
    answers = await _answers(job)
    return await asyncio.to_thread(embedding_list, body, answers, inference, job)


CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
OPENAI_ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
"""The endpoints of batches in OpenAI's form."""
_ANSWERS: Mapping[str, Answer] = {
    CHAT: _answer_chat,
    COMPLETIONS: _answer_completion,
    EMBEDDINGS: _answer_embeddings,
    MESSAGES: _answer_message,
}


async def answer_request(
    resources: InferenceResources, responses: ResponseLines, endpoint: str, work: LineWork
) -> Json:
    """Answers a request to one of these endpoints, in the lowest service tier, whatever its body asks for. Raises the errors of
    the endpoint's route.
    """
    work = replace(work, principal=replace(work.principal, tier_ceiling=_TIER))
    try:
        if endpoint == RESPONSES:
            return await responses.answer(work)
        return await _ANSWERS[endpoint](resources, work)
    except (InvalidRequest, ValidationFailed) as error:
        refused = as_invalid_request(error)
        raise (with_anthropic_fields(refused) if endpoint == MESSAGES else refused) from error


async def _answers(job: InferenceJob) -> list[GenerationFinished]:
    """Waits for all answers of a job. If the caller is cancelled, the job ends too."""
    try:
        return await job.answers()
    finally:
        job.abandon()
