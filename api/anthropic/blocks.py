"""Describes the messages of Anthropic's API and their content blocks for the OpenAPI document.

Never checks a request: `messages.py` does.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from graftwork.api.schemas.shapes import Shape


class TextBlockParam(Shape):
    """A piece of the text of a message or of a tool result."""

    type: Literal["text"]
    text: Annotated[str, Field(examples=["How is the weather?"])]


class ToolUseBlockParam(Shape):
    """A tool call in an earlier message of the assistant."""

    type: Literal["tool_use"]
    id: str
    """The id of this tool call."""
    name: Annotated[str, Field(min_length=1)]
    """The tool's name."""
    input: dict[str, Any]
    """The arguments of the call."""


class PlainTextSourceParam(Shape):
    """The text of a document."""

    type: Literal["text"]
    data: str
    """The whole text."""


class ContentSourceParam(Shape):
    """The text of a document, whole or in blocks."""

    type: Literal["content"]
    content: str | list[TextBlockParam]
    """The whole text, or its blocks in order."""


class DocumentBlockParam(Shape):
    """A document with text. Documents in a binary format, such as PDF, are refused."""

    type: Literal["document"]
    source: PlainTextSourceParam | ContentSourceParam
    """The text of the document."""
    title: str | None = None
    """The title that the model sees."""
    context: str | None = None
    """What the model should know about the document."""


class SearchResultBlockParam(Shape):
    """A text that a search has found."""

    type: Literal["search_result"]
    title: str
    """The title of the page where the text was found."""
    source: str
    """Where the text was found, such as a URL."""
    content: list[TextBlockParam]
    """The text."""


class ToolReferenceBlockParam(Shape):
    """Names a tool with `defer_loading` that the model may call from now on."""

    type: Literal["tool_reference"]
    tool_name: str
    """The name of one of the request's tools."""


class ToolResultBlockParam(Shape):
    """The result of a tool call, in a user's message."""

    type: Literal["tool_result"]
    tool_use_id: str
    """The id of the tool call that had this result."""
    content: (
        str | list[TextBlockParam | DocumentBlockParam | SearchResultBlockParam | ToolReferenceBlockParam] | None
    ) = None
    is_error: bool | None = None
    """Whether the tool failed."""


class ThinkingBlockParam(Shape):
    """The model's reasoning in an earlier message of the assistant."""

    type: Literal["thinking"]
    thinking: str
    """The text of the reasoning."""


class RedactedThinkingBlockParam(Shape):
    """Encrypted reasoning in an earlier message of the assistant. The server leaves it out."""

    type: Literal["redacted_thinking"]


class ChangedToolParam(Shape):
    """Names a tool of the request that becomes available, or is no longer available."""

    type: Literal["tool_reference"]
    name: str
    """The name of one of the request's tools."""


class ToolChangeBlockParam(Shape):
    """Offers a tool to the model, or withdraws it, from this message on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedToolParam
    """The tool that changes."""


class SystemMessageParam(Shape):
    """A system message. It may be at any place in the conversation."""

    role: Literal["system"]
    content: str | list[TextBlockParam | ToolChangeBlockParam]
    clear_at: Literal["next_user_message", "never"] | None = None
    """With `next_user_message`, the model does not see this message after a later message of the user."""


class UserMessageParam(Shape):
    """A message of the user. It can contain text, documents and results of tool calls."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]})

    role: Literal["user"]
    content: str | list[TextBlockParam | DocumentBlockParam | SearchResultBlockParam | ToolResultBlockParam]


class AssistantMessageParam(Shape):
    """A message of the assistant, with text, reasoning or tool calls.

    If it is the last message, the answer continues its text.
    """

    role: Literal["assistant"]
    content: str | list[TextBlockParam | ToolUseBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam]
