"""Defines the items of a session's history, in the shapes of the Responses API.

Owns the shapes of messages, of tool calls and of their outputs, and their form in a prompt.
Never encodes or stores anything.
Invariant: an item never changes. To replace items, a client rewinds the session to an earlier checkpoint. An item that
a client deletes from a conversation stays stored; later checkpoints hide it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import CallId, ItemId, TurnId, new_id
from graftwork.sessions.text.messages import ROLES, Message, PartRules, ToolCall, read_content
from graftwork.sessions.tools.tool_choice import CallForm, arguments_of, input_of, qualified_name

_MESSAGE_FIELDS = frozenset({"type", "role", "content", "id", "status"})
INPUT_ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")


class ItemType(StrEnum):
    MESSAGE = "message"
    FUNCTION_CALL = "function_call"
    FUNCTION_CALL_OUTPUT = "function_call_output"
    CUSTOM_TOOL_CALL = "custom_tool_call"
    """A call of a custom tool, which takes a text instead of JSON arguments."""
    CUSTOM_TOOL_CALL_OUTPUT = "custom_tool_call_output"


_CALLS = (ItemType.FUNCTION_CALL, ItemType.CUSTOM_TOOL_CALL)
OUTPUTS = (ItemType.FUNCTION_CALL_OUTPUT, ItemType.CUSTOM_TOOL_CALL_OUTPUT)
"""The types of items that are the output of a tool call."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a history: a message, a tool call or a tool's output.

    `body` is the item's JSON as clients see it, with `id` and `type`.
    """

    item_id: ItemId
    type: ItemType
    body: dict[str, Any]

    @property
    def is_call(self) -> bool:
        """Whether this item is a tool call, of a function or of a custom tool."""
        return self.type in _CALLS

    @property
    def is_output(self) -> bool:
        """Whether this item is the output of a tool call."""
        return self.type in OUTPUTS

    @property
    def tool_name(self) -> str:
        """The name by which the model knows the called tool. Only tool calls have this property."""
        return qualified_name(self.body.get("namespace"), self.body["name"])

    @property
    def arguments(self) -> str:
        """The arguments of a tool call as JSON text, as the model sees them. Only tool calls have this property."""
        assert self.is_call
        is_custom = self.type is ItemType.CUSTOM_TOOL_CALL
        arguments: str = arguments_of(self.body["input"]) if is_custom else self.body["arguments"]
        return arguments

    @property
    def call_id(self) -> CallId:
        """The id of the tool call that this item makes or answers.

        A message has no call id: do not read this property of a message.
        """
        assert self.type is not ItemType.MESSAGE
        return CallId(self.body["call_id"])

    @property
    def text(self) -> str:
        """The texts of a message's content parts, joined with line breaks. Only messages have this property."""
        assert self.type is ItemType.MESSAGE
        return "\n".join(part["text"] for part in self.body["content"])


def item_from_body(body: dict[str, Any]) -> Item:
    """Makes an item from its JSON body, as the store saved it."""
    return Item(ItemId(body["id"]), ItemType(body["type"]), body)


def copied(item: Item) -> Item:
    """Returns a copy of the item with an id of its own, for another place in a history."""
    return _item(item.type, {name: value for name, value in item.body.items() if name not in ("id", "type")})


def message(role: str, *texts: str, incomplete: bool = False, item_id: ItemId | None = None) -> Item:
    """Makes a message item with one content part for each text.

    `role` is the author: `user`, `system`, `developer` or `assistant`. `incomplete` is True if the token limit cut off
    an answer. If `item_id` is None, the item gets a new id.
    """
    spoken = role == "assistant"
    parts = [
        {"type": "output_text", "text": text, "annotations": []} if spoken else {"type": "input_text", "text": text}
        for text in texts
    ]
    status = "incomplete" if incomplete else "completed"
    return _item(ItemType.MESSAGE, {"status": status, "role": role, "content": parts}, item_id)


def function_call(
    call_id: CallId, name: str, arguments: str, *, incomplete: bool = False, item_id: ItemId | None = None
) -> Item:
    """Makes an item for a tool call of the model. `arguments` is JSON text.

    `incomplete` is True if the answer reached its token limit; the arguments may then be cut off. If `item_id` is None,
    the item gets a new id.
    """
    status = "incomplete" if incomplete else "completed"
    fields = {"status": status, "call_id": call_id, "name": name, "arguments": arguments}
    return _item(ItemType.FUNCTION_CALL, fields, item_id)


def custom_tool_call(
    call_id: CallId, name: str, text: str, *, incomplete: bool = False, item_id: ItemId | None = None
) -> Item:
    """Makes an item for a call of a custom tool. `text` is what the tool takes. See `function_call` for the others."""
    status = "incomplete" if incomplete else "completed"
    fields = {"status": status, "call_id": call_id, "name": name, "input": text}
    return _item(ItemType.CUSTOM_TOOL_CALL, fields, item_id)


def in_namespace(call: Item, namespace: str | None) -> Item:
    """Returns the tool call as one of a tool in a namespace. None stands for no namespace."""
    return call if namespace is None else replace(call, body={**call.body, "namespace": namespace})


def answer_call(call_id: CallId, form: CallForm, arguments: str, *, incomplete: bool = False) -> Item:
    """Makes the item for a tool call of the model's answer, in the form that clients see. `arguments` is JSON text."""
    item_id = call_item_id(call_id, form)
    if form.is_custom:
        call = custom_tool_call(call_id, form.name, input_of(arguments), incomplete=incomplete, item_id=item_id)
    else:
        call = function_call(call_id, form.name, arguments, incomplete=incomplete, item_id=item_id)
    return in_namespace(call, form.namespace)


def custom_tool_call_output(call_id: CallId, output: str) -> Item:
    """Makes an item for the output of the call `call_id` of a custom tool."""
    return _item(ItemType.CUSTOM_TOOL_CALL_OUTPUT, {"status": "completed", "call_id": call_id, "output": output})


def function_call_output(call_id: CallId, output: str) -> Item:
    """Makes an item for the output of the tool call `call_id`."""
    return _item(ItemType.FUNCTION_CALL_OUTPUT, {"status": "completed", "call_id": call_id, "output": output})


def parse_input(raw: object, param: str = "input") -> tuple[Item, ...]:
    """Reads the input of a turn, which is a text or a list of messages. Returns the input as message items.

    Raises ValidationFailed for wrong input. The error names the wrong field. `param` is the name of the request field
    that has the input.
    """
    if isinstance(raw, str):
        return (message("user", _text(raw, param)),)
    if not isinstance(raw, Sequence) or isinstance(raw, bytes) or not raw:
        raise ValidationFailed(f"{param} must be a text or a list of at least one item.", param=param)
    return tuple(_parse_message(entry, f"{param}[{index}]") for index, entry in enumerate(raw))


def parse_output(raw: object, param: str) -> str:
    """Returns the output of a tool as text. A text stays unchanged; any other value becomes JSON text.

    `param` is the name of the request field that has the output.
    Raises ValidationFailed if the value has no JSON form, or if the text is not valid Unicode.
    """
    if isinstance(raw, str):
        return _text(raw, param)
    try:
        return _text(json.dumps(raw, ensure_ascii=False, allow_nan=False), param)
    except (TypeError, ValueError) as error:
        raise ValidationFailed(f"{param} must be a text or JSON: {error}.", param=param) from error


def prompt_messages(items: Sequence[Item]) -> tuple[Message, ...]:
    """Converts history items to the messages of a prompt.

    An assistant's message and the tool calls that follow it become one message.
    """
    messages: list[Message] = []
    names = {item.call_id: item.tool_name for item in items if item.is_call}
    for item in items:
        if item.type is ItemType.MESSAGE:
            messages.append(Message(ROLES[item.body["role"]], item.text))
        elif item.is_call:
            caller = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
            messages.append(replace(caller, tool_calls=(*caller.tool_calls, _tool_call(item))))
        else:
            call_id = item.call_id
            messages.append(Message("tool", item.body["output"], tool_call_id=call_id, name=names.get(call_id)))
    return tuple(messages)


def open_calls(items: Iterable[Item]) -> tuple[Item, ...]:
    """Returns the tool calls of a history that have no output after them, in order."""
    waiting: dict[CallId, Item] = {}
    for item in items:
        if item.is_call:
            waiting[item.call_id] = item
        elif item.is_output:
            waiting.pop(item.call_id, None)
    return tuple(waiting.values())


def with_counterpart(items: Sequence[Item], item_id: str) -> tuple[Item, ...]:
    """Returns the item of a history that has this id, and with a tool call its output, with an output its call.

    Returns no item if the history has none with this id.
    """
    index = next((index for index, item in enumerate(items) if item.item_id == item_id), None)
    if index is None:
        return ()
    item = items[index]
    others: Iterable[Item] = ()
    if item.is_call:
        others = (other for other in items[index + 1 :] if other.is_output and other.call_id == item.call_id)
    elif item.is_output:
        others = (other for other in reversed(items[:index]) if other.is_call and other.call_id == item.call_id)
    return (item, *islice(others, 1))


def answer_message_id(turn_id: TurnId) -> ItemId:
    """Returns the id of the message item that will hold the text of the turn's answer.

    The id depends only on the turn's id, so that clients get it before the item is stored.
    """
    return ItemId("msg_" + turn_id.removeprefix("turn_"))


def call_item_id(call_id: CallId, form: CallForm) -> ItemId:
    """Returns the id of the history item for the tool call `call_id` of the model."""
    return ItemId(("ctc_" if form.is_custom else "fc_") + call_id.removeprefix("call_"))


def _item(type_: ItemType, fields: Mapping[str, Any], item_id: ItemId | None = None) -> Item:
    item_id = item_id or ItemId(new_id("item"))
    return Item(item_id, type_, {"id": item_id, "type": type_.value, **fields})


def _parse_message(raw: object, param: str) -> Item:
    if not isinstance(raw, Mapping):
        raise ValidationFailed(f"{param} must be an object.", param=param)
    type_ = raw.get("type", ItemType.MESSAGE.value)
    if type_ == ItemType.FUNCTION_CALL_OUTPUT.value:
        raise ValidationFailed(f"{param}: send tool outputs to the session's tool_outputs.", param=f"{param}.type")
    if type_ != ItemType.MESSAGE.value:
        raise ValidationFailed(f"{param}.type must be 'message', not {type_!r}.", param=f"{param}.type")
    _refuse_unknown_fields(raw, _MESSAGE_FIELDS, param)
    role = raw.get("role")
    if role not in INPUT_ROLES:
        raise ValidationFailed(f"{param}.role must be one of {', '.join(INPUT_ROLES)}.", param=f"{param}.role")
    return message(role, *_content_texts(raw.get("content"), f"{param}.content"))


def _refuse_part(_: object, param: str) -> ValidationFailed:
    return ValidationFailed(f"{param}.type must be one of {', '.join(TEXT_PARTS)}.", param=f"{param}.type")


_PARTS = PartRules(
    text_fields=dict.fromkeys(TEXT_PARTS, "text"),
    error=ValidationFailed,
    refusal=_refuse_part,
    known_fields=frozenset({"type", "text", "annotations", "logprobs"}),
)


def _content_texts(raw: object, param: str) -> list[str]:
    """Returns the texts of a message, at least one. Raises ValidationFailed for text that UTF-8 cannot encode."""
    texts = read_content(raw, param, _PARTS)
    if not texts:
        raise ValidationFailed(f"{param} must be a text or a list of parts.", param=param)
    return [_text(text, param) for text in texts]


def _refuse_unknown_fields(raw: Mapping[str, Any], known: frozenset[str], param: str) -> None:
    for field in raw:
        if field not in known:
            raise ValidationFailed(f"{param} has no field {field!r}.", param=f"{param}.{field}")


def _text(raw: object, param: str) -> str:
    """Returns `raw` if it is valid Unicode text. A lone surrogate has no UTF-8 bytes, so it has no tokens."""
    if not isinstance(raw, str):
        raise ValidationFailed(f"{param} must be a text.", param=param)
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        raise ValidationFailed(f"{param} is not valid Unicode: {error.reason}.", param=param) from error
    return raw


def _tool_call(item: Item) -> ToolCall:
    return ToolCall(item.call_id, item.tool_name, item.arguments)
