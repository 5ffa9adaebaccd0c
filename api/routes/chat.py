"""Defines the route `POST /v1/chat/completions`."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.resources import CurrentRequestId, ForInference, InferenceKey, InferenceResources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.formats.completions import ChatForm, chat_completion, write_chat_chunks
from graftwork.api.http.request import unenforced_header
from graftwork.api.http.streaming import EventStream, json_answer, until_disconnect
from graftwork.api.inference.defaults import chat_with_defaults
from graftwork.api.inference.job import ResponseHead, start_inference
from graftwork.api.inference.request import InferenceRequest, refuse_early, served_tier
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.platform.answers.chat import ChatCompletion
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.reasoning import ReasoningAsk, ReasoningModel
from graftwork.sessions.generation.sampling import token_budget
from graftwork.sessions.text.encoding import ConversationPrompt, TextPrompt
from graftwork.sessions.text.messages import messages_from_chat

router = APIRouter(prefix="/v1", tags=["inference"], route_class=OpenAiRoute)


@router.post("/chat/completions", response_model=ChatCompletion, responses=also(404, 429, 504, stream="chat"))
@takes_places
async def create_chat_completion(
    body: ChatCompletionRequest,
    request: Request,
    resources: ForInference,
    principal: InferenceKey,
    request_id: CurrentRequestId,
) -> Response:
    """Answer a conversation. With `stream`, send the answer in chunks while the model generates it."""
    with resources.accounting.take_places(principal, body.n or 1) as places:
        inference = await chat_inference(body, resources, principal, request_id)
        job = await start_inference(resources, inference, places)
    headers = {**job.headers, **unenforced_header(inference.unenforced)}
    head = ResponseHead.of("chatcmpl-", inference, resources)
    form = chat_form(body, inference)
    if body.stream:
        await until_disconnect(request, job.admitted(), job.abandon)
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        source = partial(write_chat_chunks, head, job, include_usage=include_usage, form=form)
        return EventStream(source, on_end=job.abandon, headers=headers, as_generated=True)
    answers = await until_disconnect(request, job.answers(), job.abandon)
    build = partial(chat_completion, head, answers, job, form)
    return await json_answer(build, headers, is_long=form.prompt_top is not None)


def chat_form(body: ChatCompletionRequest, inference: InferenceRequest) -> ChatForm:
    """Returns what the answers to a chat show."""
    prompt = inference.prompts[0] if body.return_token_ids else None
    return ChatForm(prompt, body.prompt_logprobs, inference.output.calls_tools)


async def chat_inference(
    body: ChatCompletionRequest, resources: InferenceResources, principal: Principal, request_id: RequestId
) -> InferenceRequest:
    """Builds the inference request for a chat completion. Raises NotFound, InvalidRequest or ContextLengthExceeded."""
    principal = principal.for_user(body.end_user)
    resolved = await resources.resolve(principal, body.model, body.adapters, user=body.end_user)
    tier = served_tier(principal, body.service_tier)
    refuse_early(resources, principal, resolved, tier)
    body = chat_with_defaults(body, resolved.defaults)
    resources.check_token_ids(body.stop_token_ids or (), "stop_token_ids")
    resources.check_token_ids([token_id for token_id, _ in body.logit_bias or ()], "logit_bias")
    planner = resources.planner.of(principal.tenant_id)
    output = await planner.plan_off_loop(body.output_constraints())
    prompt = await resources.accounting.encode(principal, resources.encoding, chat_prompt(body, resources))
    prediction = await _encode_prediction(body, resources, principal)
    context_tokens, window = resources.description.context_tokens, body.rolling_window
    budget = token_budget(len(prompt), body.token_limit, context_tokens, "messages", window)
    return InferenceRequest(
        request_id=request_id,
        principal=principal,
        resolved=resolved,
        prompts=(prompt,),
        samplings=tuple(body.sampling_params(budget.max_tokens, choice) for choice in range(body.n or 1)),
        stop=tuple(body.stop or ()),
        tier=tier,
        output=output,
        prediction_token_ids=prediction,
        expected_tokens=budget.expected_tokens,
        reasoning=ReasoningAsk(body.thinking_token_budget),
    )


def chat_prompt(body: ChatCompletionRequest, resources: InferenceResources) -> ConversationPrompt:
    """Returns the messages and tools of a chat as a prompt. Raises InvalidRequest, which names the field."""
    tools = [tool.as_template_input() for tool in body.tools or ()] if body.shows_tools else None
    return ConversationPrompt(
        messages_from_chat(body.messages),
        tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=_template_variables(body, resources.generator.reasoning) or None,
    )


def _template_variables(body: ChatCompletionRequest, model: ReasoningModel | None) -> dict[str, Any]:
    """Returns the variables of the chat template: those that the client names, and those by which it reasons."""
    switched = {} if model is None else model.template_variables(body.reasoning_effort)
    return {**switched, **(body.chat_template_kwargs or {})}


async def _encode_prediction(
    body: ChatCompletionRequest, resources: InferenceResources, principal: Principal
) -> tuple[int, ...]:
    """Encodes the text that the client expects as the answer, as the model would write it, with control tokens."""
    if body.prediction is None:
        return ()
    text = TextPrompt(body.prediction.text, continues=True, param="prediction")
    try:
        return await resources.accounting.encode(principal, resources.encoding, text)
    except ContextLengthExceeded as error:
        raise InvalidRequest(
            f"The prediction has {error.details['prompt_tokens']} tokens; this model's context is "
            f"{resources.description.context_tokens}. Shorten the prediction.",
            param="prediction",
        ) from error
