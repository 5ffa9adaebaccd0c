"""Defines the routes `POST /v1/tokenize` and `POST /v1/detokenize`, which follow vLLM's API."""

import asyncio

from fastapi import APIRouter

from graftwork.api.deps.resources import ForInference, InferenceKey, InferenceResources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from graftwork.platform.answers.models import DetokenizedPrompt, TokenizedPrompt
from graftwork.sessions.text.messages import messages_from_chat

router = APIRouter(prefix="/v1", tags=["inference"], route_class=OpenAiRoute)


@router.post("/tokenize", responses=also(404))
async def tokenize(body: TokenizeRequest, resources: ForInference, principal: InferenceKey) -> TokenizedPrompt:
    """Encode a prompt to token ids. Messages are encoded in the same way as for chat completions."""
    await resources.resolve(principal, body.model)
    token_ids = await asyncio.to_thread(_encode, body, resources)
    context_tokens = resources.description.context_tokens
    return TokenizedPrompt(tokens=token_ids, count=len(token_ids), max_model_len=context_tokens)


@router.post("/detokenize", responses=also(404))
async def detokenize(body: DetokenizeRequest, resources: ForInference, principal: InferenceKey) -> DetokenizedPrompt:
    """Decode token ids to text. The text includes control tokens."""
    await resources.resolve(principal, body.model)
    resources.check_token_ids(body.tokens, "tokens")
    text = await asyncio.to_thread(resources.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizedPrompt(prompt=text)


def _encode(body: TokenizeRequest, resources: InferenceResources) -> tuple[int, ...]:
    if body.messages is None:
        with_special = body.add_special_tokens is not False
        return resources.tokenizer.encode(body.prompt or "", allow_special=True, add_special_tokens=with_special)
    tools = [tool.as_template_input() for tool in body.tools or ()]
    return resources.chat_prompts().encode_messages(
        messages_from_chat(body.messages), tools or None, add_generation_prompt=body.add_generation_prompt is not False
    )
