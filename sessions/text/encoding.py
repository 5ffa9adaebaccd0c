"""Turns prompts into token ids: long prompts in a worker process, others on a thread, and a few words at once.

Owns the three kinds of prompts, the order of the steps (the chat template renders messages, and the tokenizer encodes
the text), the choice of where to encode, and the worker processes. The tokenizer needs seconds and a gigabyte
for a long text; a worker process that ends frees this memory. Also owns the public prefixes: system prompts that the
operator declares as public, so that all tenants may share their KV.
Never keeps the event loop busy for longer than the change to a thread would. Never encodes a text whose length proves
that it is longer than the context. Never lets the text of a user or a tool become control tokens.
Invariants: for texts that spell no control token, the ids equal those of `apply_chat_template(tokenize=True)`. Tokens
of a prompt are public only as far as they equal a declared prefix, from the first token on.
"""

import asyncio
import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.platform.worker_pool import WorkerPool
from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.final_message import OpenMessage
from graftwork.sessions.text.messages import ControlTokenEscaper, ControlTokenTexts, Message, ToolCall
from graftwork.sessions.text.tokenizer import TextTokenizer


class PromptEncoder:
    """Turns messages into the token ids of a prompt, for one model."""

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer, context_tokens: int | None = None) -> None:
        """`context_tokens` is the length of the model's context. If it is None, prompts may have every length."""
        self.template = template
        self.tokenizer = tokenizer
        self._context_tokens = context_tokens
        self.template_digest = "sha256:" + hashlib.sha256(template.source.encode()).hexdigest()
        self.tokenizer_digest = tokenizer.digest
        special = [text for token_id, text in tokenizer.added_tokens.items() if token_id in tokenizer.special_ids]
        self._literals = ControlTokenTexts(special, template.control_texts(tokenizer.added_tokens.values()))

    def encode_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> tuple[int, ...]:
        """Returns the token ids of a whole conversation, such as the first prompt of a session.

        `add_generation_prompt` adds the start of the next answer. `continue_final_message` leaves the last message
        open instead, so that the answer continues it; this message must be an assistant's text. `variables` are further
        names that the chat template can read. `param` is the request field that errors name.
        Raises InvalidRequest if the chat template refuses the messages. Raises ContextLengthExceeded before encoding if
        the length of the text proves that it cannot fit in the context. Can also raise PayloadTooLarge.
        """
        opened = OpenMessage.at_end_of(messages, self.template.source, param) if continue_final_message else None
        shown = messages if opened is None else opened.messages
        escaper = self._escaper(shown, tools, variables)
        adds_prompt = add_generation_prompt and opened is None
        text = self.template.render(
            shown, tools, add_generation_prompt=adds_prompt, variables=variables, escaper=escaper
        )
        if opened is not None:
            text = opened.cut(text)
        return self._encode(text, escaper, param, continues=False)

    def encode_delta(
        self, assistant: Message, new: Sequence[Message], *, closed: bool, param: str = "messages"
    ) -> tuple[int, ...]:
        """Returns the token ids of the text that the messages `new` add to a conversation.

        The text ends with the start of the next answer. `assistant` is the model's answer before the new messages.
        `closed` says whether the tokens of this answer end with a stop token (see `ends_turn`).
        Raises the errors of `encode_messages`.
        """
        escaper = self._escaper((assistant, *new), None, None)
        text = self.template.render_delta(assistant, new, closed=closed, escaper=escaper)
        return self._encode(text, escaper, param, continues=True)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last token of a generated message is a stop token of the model."""
        return bool(token_ids) and self.tokenizer.token_text(token_ids[-1]) in self.template.end_of_turn_texts

    def _escaper(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> ControlTokenEscaper | None:
        forms = [message.template_dict() for message in messages]
        return self._literals.escaper_for((forms, tools, variables), self.template.source)

    def _encode(
        self, text: str, escaper: ControlTokenEscaper | None, param: str, *, continues: bool
    ) -> tuple[int, ...]:
        if self._context_tokens is not None:
            self.tokenizer.check_may_fit(text, self._context_tokens, param)
        if escaper is None:
            return self.tokenizer.encode(text, allow_special=True, continues=continues)
        token_ids: list[int] = []
        for piece in escaper.split(text):
            token_ids += self.tokenizer.encode(piece.text, allow_special=not piece.is_plain, continues=continues)
            continues = True
        return tuple(token_ids)


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """The system prompts that the operator declares as public, so that all tenants may share their KV.

    Each entry of `prefixes` has the token ids of one such system prompt, rendered as the start of a prompt.
    """

    prefixes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path, encoder: PromptEncoder) -> "PublicPrefixes":
        """Reads public system prompts: one from the file `path`, or one from each `.txt` file of the folder `path`.

        Raises InvalidRequest if a file cannot be read.
        """
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        try:
            texts = [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"public_prompts: {error}. Give a UTF-8 text file, or a folder of `.txt` files.", param="public_prompts"
            ) from error
        return cls(
            tuple(encoder.encode_messages([Message("system", text)], add_generation_prompt=False) for text in texts)
        )

    def tokens_of(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens at the start of `prompt` are equal to those of a public system prompt."""
        return max((_common(prefix, prompt) for prefix in self.prefixes), default=0)


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


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


def is_short(prompt: Prompt) -> bool:
    """Returns whether a prompt takes no more time than a thread's start and end.

    Names of the client's choice may be numbers of rounds for the template, so their length says nothing.
    """
    if isinstance(prompt, ConversationPrompt) and prompt.variables:
        return False
    return not has_more_characters(prompt, SHORT_CHARACTERS)


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
SHORT_CHARACTERS = 512
"""A prompt with at most this many characters is encoded at once: a thread's start and end take 0.3 ms of the event loop,
and these characters take as long.
"""
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
        if is_short(prompt):
            return self._local.encode_fitting(prompt)
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
