"""Encodes prompts off the event loop: short prompts on a thread, long prompts in a worker process.

Owns the three kinds of prompts, the choice between thread and process, and the worker processes. The tokenizer needs
seconds and a gigabyte for a long text; a worker process that ends frees this memory.
Never encodes on the event loop. Never encodes a text whose length proves that it is longer than the context.
"""

import asyncio
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.worker_pool import WorkerPool
from graftwork.sessions.text.messages import Message, ToolCall
from graftwork.sessions.text.prompt_encoder import PromptEncoder
from graftwork.sessions.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text that is encoded without a template."""

    text: str
    add_special_tokens: bool = False
    """Whether to add the special tokens that the tokenizer puts around a text."""
    continues: bool = False
    """Whether the text follows other text of the same prompt."""
    param: str = "prompt"
    """The field of the request that errors name."""

    def texts(self) -> Iterable[Any]:
        """Returns the values whose texts count in the prompt's length."""
        return (self.text,)


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """A whole conversation, which the chat template renders."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    param: str = "messages"
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, so that the answer continues it."""
    variables: Mapping[str, Any] | None = None
    """Further names that the chat template can read."""

    def texts(self) -> Iterable[Any]:
        return (*map(_message_values, self.messages), self.tools, self.variables)


@dataclass(frozen=True, slots=True)
class ContinuationPrompt:
    """The part of a session's prompt that the messages `new` add after the generated message `assistant`."""

    assistant: Message
    new: tuple[Message, ...]
    closed: bool
    """Whether the generated message's tokens end with a stop token."""
    param: str = "input"

    def texts(self) -> Iterable[Any]:
        return map(_message_values, (self.assistant, *self.new))


Prompt = TextPrompt | ConversationPrompt | ContinuationPrompt


def has_more_characters(prompt: Prompt, limit: int) -> bool:
    """Returns whether the texts of a prompt have more than `limit` characters together. Stops counting at the limit."""
    waiting = list(prompt.texts())
    left = limit
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            left -= len(value)
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left -= len(value)
            waiting += value
        if left < 0:
            return True
    return False


def as_plain(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as texts, numbers, lists and objects. `from_plain` reads it."""
    return {"kind": type(prompt).__name__, "fields": asdict(prompt)}


def from_plain(plain: Mapping[str, Any]) -> Prompt:
    """Returns the prompt from the plain data that `as_plain` made of it."""
    fields = dict(plain["fields"])
    match plain["kind"]:
        case "TextPrompt":
            return TextPrompt(**fields)
        case "ConversationPrompt":
            return ConversationPrompt(**fields | {"messages": _messages(fields["messages"])})
        case "ContinuationPrompt":
            (assistant,) = _messages([fields["assistant"]])
            return ContinuationPrompt(**fields | {"assistant": assistant, "new": _messages(fields["new"])})
    raise ValueError(f"There is no kind of prompt named {plain['kind']!r}.")


def _message_values(message: Message) -> tuple[Any, ...]:
    calls = [(call.call_id, call.name, call.arguments) for call in message.tool_calls]
    return (message.content, message.reasoning, message.name, message.tool_call_id, calls)


def _messages(plain: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(
        Message(**fields | {"tool_calls": tuple(ToolCall(**call) for call in fields["tool_calls"])})
        for fields in map(dict, plain)
    )


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
        prompt.messages,
        prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.variables,
        param=prompt.param,
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
