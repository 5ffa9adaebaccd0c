"""Reads the `input` of a response, or the `items` of a conversation, into items of a history.

Owns the list of supported items and fields. Refuses an unsupported item with an error that names it. Ignores fields
that have no effect, for example `status`, and items that have no text for this model, for example `reasoning`.
Never reads the database: the caller passes the tool calls that still need an output.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import CallId
from graftwork.sessions.core.items import (
    INPUT_ROLES,
    Item,
    ItemType,
    custom_tool_call,
    custom_tool_call_output,
    function_call,
    function_call_output,
    in_namespace,
    message,
    parse_output,
)
from graftwork.sessions.responses.references import InputEntry, ItemReference
from graftwork.sessions.text.messages import PartRules, read_content
from graftwork.sessions.turns.running import may_be_id

MAX_INPUT_ITEMS = 4096
MAX_CALL_ID_CHARACTERS = 64
_IGNORED_TYPES = frozenset({"reasoning", "web_search_call", "file_search_call", "image_generation_call"})
"""The types of items without text for this model: the thoughts of other models, and calls of OpenAI's own tools, whose
results are in the messages after them."""
LOCAL_SHELL = "local_shell"
"""The name under which the history has the calls of OpenAI's own tool for a shell."""


def read_input(raw: object, param: str = "input") -> tuple[InputEntry, ...]:
    """Reads the input of a response or of a conversation: a list of items and references to stored items, or a text.

    A text becomes one message of the user. `param` is the name of the request field that has the input.
    Raises ValidationFailed for wrong input. The error names the wrong field.
    """
    if isinstance(raw, str):
        return (message("user", raw),)
    if not isinstance(raw, Sequence) or not 0 < len(raw) <= MAX_INPUT_ITEMS:
        raise ValidationFailed(f"{param} must be a text or a list of 1 to {MAX_INPUT_ITEMS} items.", param=param)
    read = [_read_item(entry, f"{param}[{index}]") for index, entry in enumerate(raw) if not _is_ignored(entry)]
    if not read:
        raise ValidationFailed(f"{param} has only items that are not served here: add a message.", param=param)
    return tuple(read)


def ignored_items(raw: object, param: str = "input") -> list[str]:
    """Returns the paths of the items that `read_input` leaves out, each with its type in parentheses."""
    entries = raw if isinstance(raw, list) else []
    return [f"{param}[{index}] ({entry['type']})" for index, entry in enumerate(entries) if _is_ignored(entry)]


def check_outputs(items: Sequence[Item], awaited: Collection[CallId], param: str = "input") -> None:
    """Checks that each tool call has exactly one output, and that the output comes after the call.

    The calls are those in `items`, and the earlier calls in `awaited`, whose outputs must be in `items` too.
    Raises ValidationFailed if an output is missing, or if an output belongs to no call.
    """
    open_calls = dict.fromkeys(awaited)
    for index, item in enumerate(items):
        if item.is_call:
            if item.call_id in open_calls:
                place = f"{param}[{index}].call_id"
                raise ValidationFailed(f"{place}: a call {item.call_id} waits for its output already.", param=place)
            open_calls[item.call_id] = None
        elif item.is_output:
            if item.call_id not in open_calls:
                place = f"{param}[{index}].call_id"
                raise ValidationFailed(f"{place}: no call {item.call_id} waits for an output here.", param=place)
            del open_calls[item.call_id]
    if open_calls:
        missing = ", ".join(open_calls)
        raise ValidationFailed(f"No output for the function call {missing}: add it to {param}.", param=param)


def _is_ignored(entry: object) -> bool:
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    return isinstance(kind, str) and kind in _IGNORED_TYPES


def _read_item(raw: object, param: str) -> InputEntry:
    if not isinstance(raw, Mapping):
        raise ValidationFailed(f"{param} must be an object.", param=param)
    type_ = raw.get("type") or ItemType.MESSAGE.value
    read = _READERS.get(type_) if isinstance(type_, str) else None
    if read is None:
        raise ValidationFailed(
            f"{param}.type {type_!r} is not served: send {', '.join(_READERS)}.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    return read(raw, param)


def _read_reference(raw: Mapping[str, Any], param: str) -> ItemReference:
    item_id = _text(raw, "id", param)
    if not may_be_id(item_id):
        raise ValidationFailed(f"{param}.id must be the id of an item.", param=f"{param}.id")
    return ItemReference(item_id, param)


def _read_message(raw: Mapping[str, Any], param: str) -> Item:
    role = raw.get("role")
    if role not in INPUT_ROLES:
        raise ValidationFailed(f"{param}.role must be one of {', '.join(INPUT_ROLES)}.", param=f"{param}.role")
    return message(role, *_texts(raw.get("content"), f"{param}.content"))


def _read_call(raw: Mapping[str, Any], param: str) -> Item:
    name, arguments = _text(raw, "name", param), _text(raw, "arguments", param)
    return in_namespace(function_call(_call_id(raw, param), name, arguments), _namespace(raw, param))


def _read_custom_call(raw: Mapping[str, Any], param: str) -> Item:
    name, text = _text(raw, "name", param), _text(raw, "input", param)
    return in_namespace(custom_tool_call(_call_id(raw, param), name, text), _namespace(raw, param))


def _read_shell_call(raw: Mapping[str, Any], param: str) -> Item:
    """Returns a call of OpenAI's own tool for a shell as a call of a function with the fields of its action."""
    action = raw.get("action")
    if not isinstance(action, Mapping):
        raise ValidationFailed(f"{param}.action must be an object.", param=f"{param}.action")
    return function_call(_call_id(raw, param), LOCAL_SHELL, parse_output(dict(action), f"{param}.action"))


def _read_custom_output(raw: Mapping[str, Any], param: str) -> Item:
    return custom_tool_call_output(_call_id(raw, param), _output_text(raw, param))


def _read_shell_output(raw: Mapping[str, Any], param: str) -> Item:
    """Returns the output of a call of OpenAI's own tool for a shell. Its `id` is the id of the call."""
    named = raw if raw.get("call_id") is not None else {**raw, "call_id": raw.get("id")}
    return _read_output(named, param)


def _read_output(raw: Mapping[str, Any], param: str) -> Item:
    return function_call_output(_call_id(raw, param), _output_text(raw, param))


def _output_text(raw: Mapping[str, Any], param: str) -> str:
    """Returns a tool's output as text: the text of a list of text parts, or other JSON as JSON text."""
    output, param_of_output = raw.get("output"), f"{param}.output"
    if output is None:
        raise ValidationFailed(f"{param_of_output} is missing.", param=param_of_output)
    if isinstance(output, list) and output and all(isinstance(part, Mapping) and "type" in part for part in output):
        return "\n".join(_texts(output, param_of_output))
    return parse_output(output, param_of_output)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], InputEntry]] = {
    ItemType.MESSAGE.value: _read_message,
    ItemType.FUNCTION_CALL.value: _read_call,
    ItemType.FUNCTION_CALL_OUTPUT.value: _read_output,
    ItemType.CUSTOM_TOOL_CALL.value: _read_custom_call,
    ItemType.CUSTOM_TOOL_CALL_OUTPUT.value: _read_custom_output,
    "local_shell_call": _read_shell_call,
    "local_shell_call_output": _read_shell_output,
    "item_reference": _read_reference,
}


def _refuse_part(kind: object, param: str) -> ValidationFailed:
    return ValidationFailed(
        f"{param}.type {kind!r} is not served: this model reads only text.",
        param=f"{param}.type",
        code="unsupported_value",
    )


_PARTS = PartRules(error=ValidationFailed, refusal=_refuse_part)


def _texts(content: object, param: str) -> list[str]:
    """Returns the texts of a message or of an output, at least one."""
    texts = read_content(content, param, _PARTS)
    if not texts:
        raise ValidationFailed(f"{param} must be a text or a list of parts.", param=param)
    return texts


def _call_id(raw: Mapping[str, Any], param: str) -> CallId:
    call_id = _text(raw, "call_id", param)
    if not 0 < len(call_id) <= MAX_CALL_ID_CHARACTERS:
        limit = f"{param}.call_id must have 1 to {MAX_CALL_ID_CHARACTERS} characters."
        raise ValidationFailed(limit, param=f"{param}.call_id")
    return CallId(call_id)


def _namespace(raw: Mapping[str, Any], param: str) -> str | None:
    return None if raw.get("namespace") is None else _text(raw, "namespace", param)


def _text(raw: Mapping[str, Any], field: str, param: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise ValidationFailed(f"{param}.{field} must be a text.", param=f"{param}.{field}")
    return value
