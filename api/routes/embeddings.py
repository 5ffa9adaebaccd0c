"""Defines the route `POST /v1/embeddings`.

An embedding is made of the hidden states behind the last norm of the served model, with the adapters of the request. Its
prompt runs in the same batches as all other requests, counts in the same limits and is billed as prompt tokens.
"""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from graftwork.api.deps.admission import takes_places
from graftwork.api.deps.resources import CurrentRequestId, ForInference, InferenceKey, InferenceResources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.streaming import json_answer, until_disconnect
from graftwork.api.inference.job import InferenceJob, start_inference
from graftwork.api.inference.request import InferenceRequest, refuse_early, served_tier
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.completions import Prompt
from graftwork.api.schemas.embeddings import EmbeddingsRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.answers.embeddings import EmbeddingList
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.generator import GenerationFinished

router = APIRouter(prefix="/v1", tags=["inference"], route_class=OpenAiRoute)

AT_ONCE = 8
"""How many inputs of one request the engine gets at a time. The others take no places from other requests meanwhile."""


@router.post("/embeddings", response_model=EmbeddingList, responses=also(404, 429, 504))
@takes_places
async def create_embeddings(
    body: EmbeddingsRequest,
    request: Request,
    resources: ForInference,
    principal: InferenceKey,
    request_id: CurrentRequestId,
) -> Response:
    """Embed one or more texts with the base model or an adapter. Vectors have the length 1 unless `normalize` is false."""
    check_dimensions(body, resources)
    with resources.accounting.take_places(principal, min(len(body.input), AT_ONCE)) as places:
        inference = await embeddings_inference(body, resources, principal, request_id)
        job = await start_inference(resources, inference, places)
    answers = await until_disconnect(request, job.answers(), job.abandon)
    return await json_answer(
        partial(embedding_list, body, answers, inference, job), job.headers, is_long=len(answers) > 1
    )


def check_dimensions(body: EmbeddingsRequest, resources: InferenceResources) -> None:
    """Raises InvalidRequest if the model's embeddings have fewer numbers than the request asks for."""
    hidden_size = resources.description.hidden_size
    if body.dimensions is not None and body.dimensions > hidden_size:
        message = f"dimensions is {body.dimensions}, and the model's embeddings have {hidden_size} numbers."
        raise InvalidRequest(message, param="dimensions")


async def embeddings_inference(
    body: EmbeddingsRequest, resources: InferenceResources, principal: Principal, request_id: RequestId
) -> InferenceRequest:
    """Returns what to ask of the engine for a request's embeddings."""
    principal = principal.for_user(body.end_user)
    resolved = await resources.resolve(principal, body.model, body.adapters, user=body.end_user)
    tier = served_tier(principal, body.service_tier)
    refuse_early(resources, principal, resolved, tier)
    prompts = [await _encode(text, body, resources, principal) for text in body.input]
    return InferenceRequest(
        request_id=request_id,
        principal=principal,
        resolved=resolved,
        prompts=tuple(prompts),
        samplings=(SamplingParams(max_tokens=0),),
        stop=(),
        tier=tier,
        pooling=body.pooled_by,
        at_once=AT_ONCE,
    )


async def _encode(
    text: Prompt, body: EmbeddingsRequest, resources: InferenceResources, principal: Principal
) -> tuple[int, ...]:
    """Encodes one input. Raises InvalidRequest if it is empty, has an unknown token id, or is longer than the context."""
    marks = body.add_special_tokens is not False
    token_ids = await resources.encode(principal, text, "input", add_special_tokens=marks)
    if len(token_ids) > resources.description.context_tokens:
        raise ContextLengthExceeded.of_prompt(
            len(token_ids), resources.description.context_tokens, "input", max_tokens=0
        )
    return token_ids


def embedding_list(
    body: EmbeddingsRequest, answers: Sequence[GenerationFinished], inference: InferenceRequest, job: InferenceJob
) -> dict[str, Any]:
    """Returns the answer's body. Scales the vectors."""
    data = [
        {"object": "embedding", "index": index, "embedding": _embedding(answer, body)}
        for index, answer in enumerate(answers)
    ]
    return {
        "object": "list",
        "data": data,
        "model": inference.resolved.requested,
        "service_tier": inference.tier,
        "usage": job.usage.as_body(),
    }


def _embedding(answer: GenerationFinished, body: EmbeddingsRequest) -> list[float] | str:
    assert answer.embedding is not None, "the engine ends a request for an embedding with an embedding"
    values = np.frombuffer(answer.embedding, "<f4")[: body.dimensions].astype(np.float64)
    length = float(np.linalg.norm(values))
    if body.normalize is not False and length:
        values = values / length
    numbers = values.astype("<f4")
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return [float(number) for number in numbers]
