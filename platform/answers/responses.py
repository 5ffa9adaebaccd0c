"""Defines the JSON answers of the Responses API: responses, the events of a streamed response, and conversations."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.sessions import ContentPart, Item

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(Answer):
    """The error of a response that failed."""

    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(Answer):
    """The reason why the model did not finish a response."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Counts of prompt tokens. `cached_tokens` is the number that was already in the KV cache.

    `cache_write_tokens` is always 0 on this server.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Counts of generated tokens. `reasoning_tokens` are those before the answer, in its reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """The token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseConversation(Answer):
    """The conversation that a response belongs to."""

    id: str


class ResponseState(Answer):
    """A response with its present status.

    It also has the fields of the request. A field that the request did not send has its default value.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: bool
    conversation: ResponseConversation | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    top_logprobs: int
    top_p: float
    truncation: str
    output: tuple[Item, ...]
    usage: ResponseUsage | None


class ResponseDeleted(Answer):
    """The result of deleting a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Answer):
    """The number of tokens in the prompt of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Conversation(Answer):
    """A conversation: a list of items, to which each response adds its input and output."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Answer):
    """The result of deleting a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ResponseEvent(Answer):
    """The base class of the events of a streamed response.

    `sequence_number` counts the events of one response from 0, without gaps.
    """

    type: str
    sequence_number: int


class ResponseStateEvent(ResponseEvent):
    """The event that reports a new status of a response.

    The stream ends after `response.completed`, `response.incomplete` or `response.failed`.
    """

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseState


class OutputItemEvent(ResponseEvent):
    """The event that starts (`added`) or ends (`done`) an output item of a response, such as a message or a tool call."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class ContentPartEvent(ResponseEvent):
    """The event that starts (`added`) or ends (`done`) one part of an output message."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextEvent(ResponseEvent):
    """An event about the text of an output message.

    The type `….delta` has the next part of the text in `delta`. The type `….done` has the complete text in `text`.
    """

    type: Literal["response.output_text.delta", "response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    delta: str | None = absent()
    text: str | None = absent()
    logprobs: tuple[dict[str, Any], ...]


class ArgumentsEvent(ResponseEvent):
    """An event about the arguments of a tool call. Arguments are JSON text.

    The type `….delta` has the next part of the arguments in `delta`. The type `….done` has all arguments in
    `arguments`.
    """

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    item_id: str
    output_index: int
    delta: str | None = absent()
    arguments: str | None = absent()
    name: str | None = absent()


class CustomToolInputEvent(ResponseEvent):
    """An event about the text of a call of a custom tool.

    The type `….delta` has the next part of the text in `delta`. The type `….done` has the complete text in `input`.
    """

    type: Literal["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    delta: str | None = absent()
    input: str | None = absent()


RESPONSE_EVENTS = (
    ResponseStateEvent,
    OutputItemEvent,
    ContentPartEvent,
    TextEvent,
    ArgumentsEvent,
    CustomToolInputEvent,
)
