"""Defines the route `POST /v1/completions`."""

from functools import partial

from fastapi import APIRouter, Request, Response

from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.resources import CurrentRequestId, ForInference, InferenceKey, InferenceResources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.formats.completions import CompletionForm, completion, write_completion_chunks
from graftwork.api.http.request import unenforced_header
from graftwork.api.http.streaming import EventStream, json_answer, until_disconnect
from graftwork.api.inference.defaults import completion_with_defaults
from graftwork.api.inference.job import ResponseHead, start_inference
from graftwork.api.inference.request import InferenceRequest, refuse_early, served_tier
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.completions import CompletionRequest, Prompt
from graftwork.platform.answers.completions import TextCompletion
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.constraints import OutputConstraints
from graftwork.sessions.generation.sampling import token_budget

router = APIRouter(prefix="/v1", tags=["inference"], route_class=OpenAiRoute)


@router.post("/completions", response_model=TextCompletion, responses=also(404, 429, 504, stream="completions"))
@takes_places
async def create_completion(
    body: CompletionRequest,
    request: Request,
    resources: ForInference,
    principal: InferenceKey,
    request_id: CurrentRequestId,
) -> Response:
    """Complete one or more prompts. With `stream`, send the completions in chunks while the model generates them."""
    with resources.accounting.take_places(principal, len(body.prompt) * (body.n or 1)) as places:
        inference = await completion_inference(body, resources, principal, request_id)
        form = completion_form(body, resources, inference)
        job = await start_inference(resources, inference, places)
    headers = {**job.headers, **unenforced_header(inference.unenforced)}
    head = ResponseHead.of("cmpl-", inference, resources)
    if body.stream:
        await until_disconnect(request, job.admitted(), job.abandon)
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        source = partial(write_completion_chunks, head, form, job, include_usage=include_usage)
        return EventStream(source, on_end=job.abandon, headers=headers, as_generated=True)
    answers = await until_disconnect(request, job.answers(), job.abandon)
    return await json_answer(partial(completion, head, form, answers, job), headers, is_long=form.shows_prompt)


async def completion_inference(
    body: CompletionRequest, resources: InferenceResources, principal: Principal, request_id: RequestId
) -> InferenceRequest:
    """Builds the inference request for a text completion. Raises NotFound, InvalidRequest or ContextLengthExceeded."""
    principal = principal.for_user(body.end_user)
    resolved = await resources.resolve(principal, body.model, body.adapters, user=body.end_user)
    tier = served_tier(principal, body.service_tier)
    refuse_early(resources, principal, resolved, tier)
    body = completion_with_defaults(body, resolved.defaults)
    resources.check_token_ids(body.stop_token_ids or (), "stop_token_ids")
    resources.check_token_ids([token_id for token_id, _ in body.logit_bias or ()], "logit_bias")
    constraints = OutputConstraints(response_format=body.response_format_fields())
    output = await resources.planner.of(principal.tenant_id).plan_off_loop(constraints)
    marks = body.add_special_tokens is not False
    prompts = tuple(
        [await resources.encode(principal, prompt, "prompt", add_special_tokens=marks) for prompt in body.prompt]
    )
    context_tokens, window = resources.description.context_tokens, body.rolling_window
    budgets = [token_budget(len(prompt), body.token_limit, context_tokens, "prompt", window) for prompt in prompts]
    most_tokens = max(budget.max_tokens for budget in budgets)  # the engine ends each answer at the context's end
    return InferenceRequest(
        request_id=request_id,
        principal=principal,
        resolved=resolved,
        prompts=prompts,
        samplings=tuple(body.sampling_params(most_tokens, choice) for choice in range(body.n or 1)),
        stop=tuple(body.stop or ()),
        tier=tier,
        output=output,
        stop_logprobs=bool(body.echo),
        expected_tokens=sum(budget.expected_tokens for budget in budgets),
    )


def completion_form(
    body: CompletionRequest, resources: InferenceResources, inference: InferenceRequest
) -> CompletionForm:
    """Returns what the answers to a text completion show."""
    prompts = tuple(prompt for prompt in inference.prompts for _ in inference.samplings)
    texts = [_echo(prompt, resources) if body.echo else "" for prompt in body.prompt]
    echoes = tuple(text for text in texts for _ in inference.samplings)
    return CompletionForm(
        prompts,
        echoes,
        with_token_ids=bool(body.return_token_ids),
        choices_per_prompt=len(inference.samplings),
        echo_top=body.logprobs if body.echo else None,
        prompt_top=body.prompt_logprobs,
    )


def _echo(prompt: Prompt, resources: InferenceResources) -> str:
    if isinstance(prompt, str):
        return prompt
    return resources.tokenizer.decode(prompt, skip_special_tokens=False)
