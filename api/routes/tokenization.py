"""Defines the routes `POST /v1/tokenize` and `POST /v1/detokenize`, which follow vLLM's API.

The same routes also have vLLM's own paths, `/tokenize` and `/detokenize`.
"""

import asyncio

from fastapi import APIRouter

from graftwork.api.deps.resources import ForInference, InferenceKey
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from graftwork.platform.answers.models import DetokenizedPrompt, TokenizedPrompt
from graftwork.sessions.text.encoding import ConversationPrompt, Prompt, TextPrompt
from graftwork.sessions.text.messages import messages_from_chat

router = APIRouter(tags=["inference"], route_class=OpenAiRoute)


@router.post("/tokenize", responses=also(404, 429), include_in_schema=False)
@router.post("/v1/tokenize", responses=also(404, 429))
async def tokenize(body: TokenizeRequest, resources: ForInference, principal: InferenceKey) -> TokenizedPrompt:
    """Encode a prompt to token ids. Messages are encoded in the same way as for chat completions.

    The request counts in the tenant's limits of requests. A prompt that is longer than the context is refused.
    """
    if body.model is not None:
        await resources.resolve(principal, body.model)
    prompt = _prompt(body)
    async with resources.accounting.counted(principal):
        token_ids = await resources.encoding.encode(principal.tenant_id, prompt)
    context_tokens = resources.description.context_tokens
    spellings = None
    if body.return_token_strs:
        spellings = tuple(resources.tokenizer.token_text(token_id) or "" for token_id in token_ids)
    return TokenizedPrompt(tokens=token_ids, count=len(token_ids), max_model_len=context_tokens, token_strs=spellings)


@router.post("/detokenize", responses=also(404, 429), include_in_schema=False)
@router.post("/v1/detokenize", responses=also(404, 429))
async def detokenize(body: DetokenizeRequest, resources: ForInference, principal: InferenceKey) -> DetokenizedPrompt:
    """Decode token ids to text. The text includes control tokens."""
    if body.model is not None:
        await resources.resolve(principal, body.model)
    resources.check_token_ids(body.tokens, "tokens")
    async with resources.accounting.counted(principal):
        text = await asyncio.to_thread(resources.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizedPrompt(prompt=text)


def _prompt(body: TokenizeRequest) -> Prompt:
    if body.messages is None:
        return TextPrompt(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tools = [tool.as_template_input() for tool in body.tools or ()]
    return ConversationPrompt(
        messages_from_chat(body.messages),
        tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or None,
    )
