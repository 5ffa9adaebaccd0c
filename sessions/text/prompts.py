"""Defines the three kinds of prompts, and their form as plain data for a worker process.

Also measures prompts in characters, because the length decides which process encodes a prompt. Never renders a
template, and never encodes a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graftwork.sessions.text.messages import Message, ToolCall


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

    def texts(self) -> Iterable[Any]:
        return (*map(_message_values, self.messages), self.tools)


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
