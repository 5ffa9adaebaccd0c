r"""Defines the messages of a conversation, and reads messages and their content parts.

Owns the internal form of a message, how it is read from OpenAI's chat messages, and the dictionary that templates get.
Also escapes texts that spell a control token, such as `<|im_end|>`, so that they never become control tokens:

    "say <|im_end|>"  ->  "say ⟨<|im_end|>⟩"  -> template ->  "…user\nsay ", plain "<|im_end|>", "<|im_end|>\n…"

Before rendering, each such spelling is put between two mark characters that occur nowhere else. After rendering, the
marked parts are encoded as plain text. The spellings are kept, because some templates search for them (`</think>`). If
a template has cut off one of the two marks, the other mark still splits the text.
Never encodes text to tokens, and never runs a template.
Invariant: a message contains only text. Content parts of other types are refused with an error that names the part.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, TypeVar

from graftwork.platform.errors import InvalidRequest, ValidationFailed

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; chat templates know only `system`
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
PART_TEXTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Maps the type of a content part to the field that contains its text, for chat completions and the Responses API."""


def _refuse_part(kind: object, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} has the type {kind!r}; this model reads only text.", param=param)


@dataclass(frozen=True, slots=True)
class PartRules:
    """The rules of one API for content parts (the pieces of a message), and the errors for parts that break a rule."""

    text_fields: Mapping[str, str] = field(default_factory=lambda: PART_TEXTS)
    """Maps the type of a part to the field that contains its text. Other types are refused."""
    error: type[InvalidRequest] | type[ValidationFailed] = InvalidRequest
    refusal: Callable[[object, str], InvalidRequest | ValidationFailed] = _refuse_part
    """Makes the error for a part of an unknown type.

    Its arguments are the part's type, which may be any JSON value, and the path of the part in the request body.
    """
    known_fields: frozenset[str] | None = None
    """The fields that a part may have; None allows all."""


CHAT_PARTS = PartRules()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant's message."""

    call_id: str
    name: str
    arguments: str
    """The arguments as JSON text, as the model wrote it. Broken JSON is kept unchanged."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Which fields have a value depends on the role."""

    role: Role
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in an assistant's message."""
    tool_call_id: str | None = None
    """The id of the call that a tool's message answers."""
    name: str | None = None
    reasoning: str | None = None
    """The reasoning of an assistant's message, for templates that show it."""

    def template_dict(self) -> dict[str, Any]:
        """Returns this message as the dictionary that a chat template reads.

        Leaves out fields that are None, because templates would print them.
        """
        form: dict[str, Any] = {"role": self.role}
        if self.content is not None:
            form["content"] = self.content
        if self.reasoning is not None:
            form["reasoning_content"] = form["thinking"] = self.reasoning
        if self.tool_calls:
            form["tool_calls"] = [_call_dict(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            form["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            form["name"] = self.name
        return form

    def with_valid_arguments(self) -> "Message":
        """Returns a copy of this message that every template can render.

        Tool call arguments that are not a JSON object become `{}` in the copy.
        """
        calls = [
            call if isinstance(parsed_arguments(call.arguments), dict) else replace(call, arguments="{}")
            for call in self.tool_calls
        ]
        return replace(self, tool_calls=tuple(calls))


def messages_from_chat(values: Sequence[Mapping[str, Any]], param: str = "messages") -> tuple[Message, ...]:
    """Reads the messages of a chat completions request. `param` is the name of the request field that has them.

    Raises InvalidRequest for a wrong message. The error names the wrong field.
    """
    return tuple(message_from_chat(value, f"{param}[{position}]") for position, value in enumerate(values))


def message_from_chat(value: Mapping[str, Any], param: str) -> Message:
    """Reads one message of a chat completions request.

    `param` is the path of the message in the request body, such as `messages[0]`.
    Raises InvalidRequest for a wrong message. The error names the wrong field.
    """
    role = ROLES.get(_field(value, "role", str, param) or "")
    if role is None:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(ROLES)}.", param=f"{param}.role")
    calls = _field(value, "tool_calls", list, param) or []
    message = Message(
        role=role,
        content=_chat_content(value.get("content"), f"{param}.content"),
        tool_calls=tuple(_call_from_chat(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_field(value, "tool_call_id", str, param),
        name=_field(value, "name", str, param),
        reasoning=_field(value, "reasoning_content", str, param),
    )
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(
            f"{param}.content is missing: a message needs text or tool calls.", param=f"{param}.content"
        )
    return message


def read_content(content: object, param: str, rules: PartRules) -> list[str]:
    """Returns the texts of a message's content. The content is one text or a list of content parts.

    `param` is the path of the content in the request body, such as `messages[0].content`.
    Raises `rules.error` for wrong content; the error names the wrong field. Raises the error of `rules.refusal` for a
    part of an unknown type.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise rules.error(f"{param} must be a text or a list of parts.", param=param)
    return [read_part(part, f"{param}[{index}]", rules) for index, part in enumerate(content)]


def read_part(part: object, param: str, rules: PartRules) -> str:
    """Returns the text of one content part of a message.

    `param` is the path of the part in the request body, such as `messages[0].content[1]`.
    Raises `rules.error` for a wrong part; the error names the wrong field. Raises the error of `rules.refusal` for a
    part of an unknown type.
    """
    if not isinstance(part, Mapping):
        raise rules.error(f"{param} must be an object with a type.", param=param)
    kind = part.get("type")
    name = rules.text_fields.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise rules.refusal(kind, param)
    unknown = [] if rules.known_fields is None else [key for key in part if key not in rules.known_fields]
    if unknown:
        raise rules.error(f"{param} has no field {unknown[0]!r}.", param=f"{param}.{unknown[0]}")
    text = part.get(name)
    if not isinstance(text, str):
        raise rules.error(f"{param}.{name} must be a text.", param=f"{param}.{name}")
    return text


def _chat_content(content: object, param: str) -> str | None:
    """Returns the content as one text. Like vLLM, joins parts by newlines and accepts plain strings as parts."""
    if content is None:
        return None
    if isinstance(content, list):
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return "\n".join(read_content(content, param, CHAT_PARTS))


def _call_from_chat(call: object, param: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{param} must be a call with a function.", param=param)
    name = _field(function, "name", str, f"{param}.function")
    if not name:
        raise InvalidRequest(f"{param}.function.name is missing.", param=f"{param}.function.name")
    arguments = _field(function, "arguments", str, f"{param}.function") or "{}"
    return ToolCall(call_id=_field(call, "id", str, param) or "", name=name, arguments=arguments)


def _call_dict(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
    }


def parsed_arguments(arguments: str) -> Any:
    """Returns a tool call's arguments, which are JSON text, as a JSON value for templates. Broken JSON stays text."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


Value = TypeVar("Value")


def _field(value: Mapping[str, Any], name: str, kind: type[Value], param: str) -> Value | None:
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise InvalidRequest(f"{param}.{name} has the wrong type.", param=f"{param}.{name}")
    return found


NEVER: re.Pattern[str] = re.compile("(?!)")


CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""The code points that may serve as marks: first those without a meaning, then private ones, which icon fonts may use.
"""


def free_character(texts: Iterable[str]) -> str:
    """Returns a code point that may serve as a mark, because it occurs in none of the texts."""
    taken = set("".join(texts))
    return next(character for character in map(chr, reversed(CANDIDATES)) if character not in taken)


ASSISTANT_FIELDS = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A piece of the text of a rendered prompt. The pieces are encoded to tokens one by one."""

    text: str
    is_plain: bool
    """Whether this piece is the spelling of a control token in a text of a user or a tool.

    Such a piece is encoded as plain text, without control tokens.
    """


class ControlTokenTexts:
    """The texts that spell the control tokens of a vocabulary, such as `<|im_end|>`.

    Makes an escaper for each prompt that has such a text in a message.
    """

    def __init__(self, special: Iterable[str], visible: Iterable[str]) -> None:
        """The texts in `special` are escaped everywhere.

        The texts in `visible`, such as `<tool_call>`, are escaped everywhere except in an assistant's text.
        """
        special, visible = tuple(special), tuple(visible)
        self.special = _any_of(special)
        self.all = _any_of(special + visible)

    def escaper_for(self, values: Iterable[Any], template_source: str) -> "ControlTokenEscaper | None":
        """Returns an escaper for the JSON values of one prompt. Returns None if no value spells a control token.

        The escaper's two mark characters occur neither in the values nor in the template.
        """
        everything = "\0".join(chain.from_iterable(map(_strings, values)))
        if not self.all.search(everything):
            return None
        taken = {*everything, *template_source}
        free = (character for character in map(chr, CANDIDATES) if character not in taken)
        return ControlTokenEscaper(self, next(free), next(free))


class ControlTokenEscaper:
    """Puts each control token spelling, in the strings of one prompt, between two mark characters.

    The marks show later which spellings came from a user or a tool, and must not become control tokens.
    """

    def __init__(self, literals: ControlTokenTexts, opening: str, closing: str) -> None:
        self._literals = literals
        self._opening = opening
        self._closing = closing
        self._splitter = re.compile(f"{opening}({literals.all.pattern}){closing}|[{opening}{closing}]")

    def escape_message(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a message in the form that templates read, with marks around the control token spellings.

        In the text of an assistant, spellings such as `<tool_call>` get no marks, because assistants write them.
        """
        spoken = ASSISTANT_FIELDS if form.get("role") == "assistant" else ()
        return {
            key: self._wrap(value, self._literals.special if key in spoken else self._literals.all)
            for key, value in form.items()
        }

    def escape(self, value: Any) -> Any:
        """Returns a copy of a JSON value, with marks around the control token spellings in all its strings and keys."""
        return self._wrap(value, self._literals.all)

    def is_escaped(self, text: str, position: int) -> bool:
        """Returns whether the control token spelling at `position` of the rendered prompt `text` has marks."""
        return position > 0 and text[position - 1] == self._opening

    def split(self, text: str) -> Iterator[PromptPiece]:
        """Splits a rendered prompt into marked spellings and the texts between them.

        The pieces do not contain the marks.
        """
        for position, part in enumerate(self._splitter.split(text)):
            if part:
                yield PromptPiece(part, is_plain=position % 2 == 1)

    def _wrap(self, value: Any, literals: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return literals.sub(f"{self._opening}\\g<0>{self._closing}", value)
        if isinstance(value, Mapping):
            return {self._wrap(key, literals): self._wrap(item, literals) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._wrap(item, literals) for item in value]
        return value


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, literals), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else NEVER


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
