"""Translates the messages of Anthropic's API to messages of OpenAI's chat completions. Never renders a prompt.

Chat templates expect one message for each tool result. So a user's message with several results becomes several
messages, in the order of its blocks. Documents and search results become text between tags.
Invariant: no content block is dropped in silence. If the model cannot read a block, an error names the block, or
`hints.py` lists it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from graftwork.api.anthropic.hints import UNSHOWN_BLOCKS, is_billing_text
from graftwork.api.anthropic.schemas import Block, ConversationMessage
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.messages import PartRules, read_part

ChatMessage = dict[str, Any]

TextReader = Callable[[Block, str], str]
"""Returns the text that the model sees for a block. Its second argument is the path of the block in the request."""
NO_READERS: Mapping[str, TextReader] = {}


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[ConversationMessage]) -> list[ChatMessage]:
    """Translates the messages of a request in Anthropic's form to chat messages in OpenAI's form.

    `system` is the text of the system message before the conversation.
    Raises InvalidRequest if the model cannot read a content block. The error names this block.
    """
    found = [*_system_messages(_blocks(system), "system")]
    last_of_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        if message.clear_at != "next_user_message" or index > last_of_user:
            found += _READERS[message.role](_blocks(message.content), f"messages[{index}].content")
    return found


def _system_messages(blocks: Sequence[Block], param: str) -> Iterator[ChatMessage]:
    """Yields the message, unless all its blocks are changes of tools, which `tools.py` reads."""
    texts = [
        _text_part(block, f"{param}[{index}]")
        for index, block in enumerate(blocks)
        if block.get("type") not in ("tool_addition", "tool_removal") and not is_billing_text(block)
    ]
    if texts:
        yield {"role": "system", "content": texts}


def _user_messages(blocks: Sequence[Block], param: str) -> Iterator[ChatMessage]:
    """Yields one message for each tool result, and one message for each group of blocks between results."""
    placed = [(block, f"{param}[{index}]") for index, block in enumerate(blocks)]
    for answers_a_tool, group in groupby(placed, key=lambda entry: entry[0].get("type") == "tool_result"):
        if answers_a_tool:
            yield from (_tool_message(block, place) for block, place in group)
        else:
            yield {"role": "user", "content": [_text_part(block, place, _CONTENT_READERS) for block, place in group]}
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
            case kind if kind in UNSHOWN_BLOCKS:
                continue
            case "compaction" if block.get("content") is None:
                continue  # a compaction that has failed
            case "compaction":
                parts.append(_as_part(_field(block, "content", str, place)))
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
    content = block.get("content")
    text = "" if content is None else _joined(content, f"{param}.content", _RESULT_READERS)
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


def _refuse_block(kind: object, param: str) -> InvalidRequest:
    shown = f"an {kind}" if kind == "image" else f"of the type {kind!r}"
    return InvalidRequest(f"{param} is {shown}, but this model reads only text: leave it out.", param=param)


_TEXT_BLOCKS = PartRules(text_fields={"text": "text"}, refusal=_refuse_block)


def _document(block: Block, param: str) -> str:
    """Returns the text of a document between tags. Raises InvalidRequest for PDF and other binary documents."""
    source = _field(block, "source", dict, param)
    match source.get("type"):
        case "text":
            text = _field(source, "data", str, f"{param}.source")
        case "content":
            text = _joined(source.get("content"), f"{param}.source.content", NO_READERS)
        case kind:
            raise InvalidRequest(
                f"{param} is a document whose source has the type {kind!r}, but this model reads only text: send its "
                "text with the source type 'text'.",
                param=param,
            )
    given = [name for name in ("title", "context") if block.get(name) is not None]
    return _tagged("document", {name: _field(block, name, str, param) for name in given}, text)


def _search_result(block: Block, param: str) -> str:
    text = _joined(block.get("content"), f"{param}.content", NO_READERS)
    named = {name: _field(block, name, str, param) for name in ("title", "source")}
    return _tagged("search_result", named, text)


def _tool_reference(block: Block, param: str) -> str:
    return f"The tool {_field(block, 'tool_name', str, param)} can be called now."


_CONTENT_READERS: Mapping[str, TextReader] = {"document": _document, "search_result": _search_result}
_RESULT_READERS: Mapping[str, TextReader] = {**_CONTENT_READERS, "tool_reference": _tool_reference}


def _tagged(tag: str, attributes: Mapping[str, str], text: str) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in attributes.items()]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])


def _joined(content: object, param: str, readers: Mapping[str, TextReader]) -> str:
    """Returns the texts of a content as one text. Raises InvalidRequest for a block without a reader."""
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{param} must be a text or a list of blocks.", param=param)
    texts = [_text_of(block, f"{param}[{index}]", readers) for index, block in enumerate(_blocks(content))]
    return "\n".join(texts)


def _text_of(block: object, param: str, readers: Mapping[str, TextReader]) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    reader = readers.get(kind) if isinstance(kind, str) else None
    return read_part(block, param, _TEXT_BLOCKS) if reader is None else reader(dict(block), param)  # type: ignore[call-overload]


def _text_part(block: object, param: str, readers: Mapping[str, TextReader] = NO_READERS) -> Block:
    """Translates a block to a text part. Raises InvalidRequest for images, binary documents and other blocks."""
    return _as_part(_text_of(block, param, readers))


def _as_part(text: str) -> Block:
    return {"type": "text", "text": text}


def _field(block: Mapping[str, Any], name: str, kind: type[Any], param: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        raise InvalidRequest(f"{param}.{name} is missing or has the wrong type.", param=f"{param}.{name}")
    return value
