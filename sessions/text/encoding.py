"""Encodes prompts off the event loop: short prompts on a thread, long prompts in a worker process.

Owns the choice between the two, and the worker processes. The tokenizer needs seconds and a gigabyte for a long text; a
worker process that ends frees this memory. Never encodes on the event loop. Never encodes a text whose length proves
that it is longer than the context.
"""

import asyncio
import os
from array import array
from dataclasses import dataclass
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.worker_pool import WorkerPool
from graftwork.sessions.text.prompt_encoder import PromptEncoder
from graftwork.sessions.text.prompts import (
    ContinuationPrompt,
    ConversationPrompt,
    Prompt,
    TextPrompt,
    as_plain,
    has_more_characters,
)
from graftwork.sessions.text.tokenizer import TextTokenizer

LONG_CHARACTERS = 32_768
"""A prompt with more characters than this is encoded in a worker process."""
_MOST_WORKERS = 4
_MODULE = "graftwork.sessions.text.encoding_worker"


@dataclass(frozen=True, slots=True)
class LocalEncoding:
    """Encodes prompts in this process. Its methods block the thread that calls them."""

    tokenizer: TextTokenizer
    encoder: PromptEncoder | None
    """It is None for a model without a chat template."""
    context_tokens: int

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the token ids of a prompt. There may be more ids than the context has tokens.

        Raises ContextLengthExceeded before encoding if the length of the text proves that it cannot fit in the context.
        Raises InvalidRequest for messages that the template refuses.
        """
        if isinstance(prompt, TextPrompt):
            self.tokenizer.check_may_fit(prompt.text, self.context_tokens, prompt.param)
            return self.tokenizer.encode(
                prompt.text,
                allow_special=True,
                add_special_tokens=prompt.add_special_tokens,
                continues=prompt.continues,
            )
        if self.encoder is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot chat; use /v1/completions.", code="no_chat_template"
            )
        return encode_with_template(self.encoder, prompt)

    def encode_fitting(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the token ids of a prompt. Raises ContextLengthExceeded if the context has fewer tokens."""
        token_ids = self.encode(prompt)
        if len(token_ids) > self.context_tokens:
            raise ContextLengthExceeded.of_prompt(len(token_ids), self.context_tokens, prompt.param)
        return token_ids


def encode_with_template(encoder: PromptEncoder, prompt: ConversationPrompt | ContinuationPrompt) -> tuple[int, ...]:
    """Returns the token ids of messages. Raises InvalidRequest."""
    if isinstance(prompt, ContinuationPrompt):
        return encoder.encode_delta(prompt.assistant, prompt.new, closed=prompt.closed, param=prompt.param)
    return encoder.encode_messages(
        prompt.messages, prompt.tools, add_generation_prompt=prompt.add_generation_prompt, param=prompt.param
    )


class PromptEncoding:
    """Encodes the prompts of one model for all tenants."""

    def __init__(self, local: LocalEncoding, clock: Clock, *, num_workers: int | None = None) -> None:
        """`clock` gives the date that templates write. By default there is a worker for each two cores, at most four."""
        self._local = local
        self._clock = clock
        workers = num_workers or min(_MOST_WORKERS, max(1, (os.cpu_count() or 1) // 2))
        self.workers = WorkerPool(_MODULE, self._setup, num_workers=workers)

    def is_long(self, prompt: Prompt) -> bool:
        """Returns whether a worker process encodes this prompt."""
        return has_more_characters(prompt, LONG_CHARACTERS)

    async def encode(self, owner: str, prompt: Prompt) -> tuple[int, ...]:
        """Returns the token ids of a prompt of the tenant `owner`. Encodes one long prompt of a tenant at a time.

        Raises ContextLengthExceeded if the prompt has more tokens than the context. Can also raise InvalidRequest, and
        for a long prompt the errors of `WorkerPool.run`.
        """
        if not self.is_long(prompt):
            return await asyncio.to_thread(self._local.encode_fitting, prompt)
        packed = array("i")
        packed.frombytes(await self._run(owner, prompt, "encode"))
        return tuple(packed)

    async def count(self, owner: str, prompt: Prompt) -> int:
        """Returns the number of tokens of a prompt, which may be larger than the context.

        Raises ContextLengthExceeded if the length of the text proves that it cannot fit in the context. Can also raise
        InvalidRequest, and for a long prompt the errors of `WorkerPool.run`.
        """
        if not self.is_long(prompt):
            return len(await asyncio.to_thread(self._local.encode, prompt))
        return int(await self._run(owner, prompt, "count"))

    async def close(self) -> None:
        """Ends the worker processes."""
        await self.workers.close()

    async def _run(self, owner: str, prompt: Prompt, verb: str) -> Any:
        return await self.workers.run(owner, {"verb": verb, "now": self._clock.now(), "prompt": as_plain(prompt)})

    def _setup(self) -> dict[str, Any]:
        """Returns the tokenizer and the chat template of the model as plain data, for a worker."""
        local = self._local
        template = None if local.encoder is None else local.encoder.template
        return {
            "tokenizer": local.tokenizer.backend.to_str(),
            "context_tokens": local.context_tokens,
            "template": None
            if template is None
            else {
                "source": template.source,
                "special_tokens": template.special_tokens,
                "end_of_turn_texts": list(template.end_of_turn_texts),
            },
        }
