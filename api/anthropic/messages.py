"""Translates the messages of Anthropic's API to messages of OpenAI's chat completions. Never renders a prompt.

Chat templates expect one message for each tool result. So a user's message with several results becomes several
messages, in the order of its blocks.
Invariant: no content block is dropped. If the model cannot read a block, an error names the block.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from graftwork.api.anthropic.schemas import Block, ConversationMessage
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.messages import PartRules, read_part

ChatMessage = dict[str, Any]


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[ConversationMessage]) -> list[ChatMessage]:
    """Translates the messages of a request in Anthropic's form to chat messages in OpenAI's form.

    `system` is the text of the system message before the conversation.
    Raises InvalidRequest if the model cannot read a content block. The error names this block.
    """
    found = [] if system is None else [{"role": "system", "content": _texts(system, "system")}]
    for index, message in enumerate(messages):
        found += _READERS[message.role](_blocks(message.content), f"messages[{index}].content")
    return found


def _system_messages(blocks: Sequence[Block], param: str) -> Iterator[ChatMessage]:
    yield {"role": "system", "content": _texts(blocks, param)}


def _user_messages(blocks: Sequence[Block], param: str) -> Iterator[ChatMessage]:
    """Yields one message for each tool result, and one message for each group of blocks between results."""
    placed = [(block, f"{param}[{index}]") for index, block in enumerate(blocks)]
    for answers_a_tool, group in groupby(placed, key=lambda entry: entry[0].get("type") == "tool_result"):
        if answers_a_tool:
            yield from (_tool_message(block, place) for block, place in group)
        else:
            yield {"role": "user", "content": [_text_part(block, place) for block, place in group]}
    if not blocks:
        yield {"role": "user", "content": ""}


def _assistant_messages(blocks: Sequence[Block], param: str) -> Iterator[ChatMessage]:
    parts: list[Block] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{param}[{index}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking":
                thoughts.append(_field(block, "thinking", str, place))
            case _:
                parts.append(_text_part(block, place))
    message: ChatMessage = {"role": "assistant", "content": parts or ("" if not calls else None)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield message


_READERS: Mapping[str, Callable[[Sequence[Block], str], Iterator[ChatMessage]]] = {
    "user": _user_messages,
    "assistant": _assistant_messages,
    "system": _system_messages,
}


def _tool_message(block: Block, param: str) -> ChatMessage:
    """Translates a tool result. An error becomes `{"error": …}`, the form that Graftwork's own clients send."""
    text = "\n".join(part["text"] for part in _texts(block.get("content") or "", f"{param}.content"))
    if block.get("is_error"):
        text = json.dumps({"error": text}, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", str, param), "content": text}


def _call(block: Block, param: str) -> dict[str, Any]:
    arguments = json.dumps(_field(block, "input", dict, param), ensure_ascii=False)
    function = {"name": _field(block, "name", str, param), "arguments": arguments}
    return {"id": _field(block, "id", str, param), "type": "function", "function": function}


def _blocks(content: object) -> list[Block]:
    """Returns the blocks of a message's content. Plain text becomes one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _texts(content: object, param: str) -> list[Block]:
    """Translates content that may contain only text blocks."""
    return [_text_part(block, f"{param}[{index}]") for index, block in enumerate(_blocks(content))]


def _refuse_block(kind: object, param: str) -> InvalidRequest:
    shown = f"an {kind}" if kind == "image" else f"of the type {kind!r}"
    return InvalidRequest(f"{param} is {shown}, but this model reads only text: leave it out.", param=param)


_TEXT_BLOCKS = PartRules(text_fields={"text": "text"}, refusal=_refuse_block)


def _text_part(block: object, param: str) -> Block:
    """Translates a text block. Raises InvalidRequest for images, documents and other types of block."""
    return {"type": "text", "text": read_part(block, param, _TEXT_BLOCKS)}


def _field(block: Mapping[str, Any], name: str, kind: type[Any], param: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        raise InvalidRequest(f"{param}.{name} is missing or has the wrong type.", param=f"{param}.{name}")
    return value
