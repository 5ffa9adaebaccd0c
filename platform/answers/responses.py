"""Defines the answers of the Responses API: responses, their events, and conversations."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.sessions import ContentPart, Item

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(Answer):
    """The reason why a response failed."""

    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(Answer):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """The number of prompt tokens that came from the cache. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """The number of reasoning tokens. This server always reports 0."""

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
    """A response in any state. It repeats the request's fields, and fills in the defaults."""

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


class Conversation(Answer):
    """A conversation. Each response in it adds items to it."""

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
    """The base of a response's events. `sequence_number` counts the response's events from 0 without gaps."""

    type: str
    sequence_number: int


class ResponseStateEvent(ResponseEvent):
    """Reports a new state of the response. The stream ends after `completed`, `incomplete` or `failed`."""

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
    """Starts or ends an output item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class ContentPartEvent(ResponseEvent):
    """Starts or ends a part of a message."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextEvent(ResponseEvent):
    """Adds the text in `delta` to a message, or repeats the whole text in `text`."""

    type: Literal["response.output_text.delta", "response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    delta: str | None = absent()
    text: str | None = absent()
    logprobs: tuple[dict[str, Any], ...]


class ArgumentsEvent(ResponseEvent):
    """Adds the JSON text in `delta` to a call's arguments, or repeats all arguments in `arguments`."""

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    item_id: str
    output_index: int
    delta: str | None = absent()
    arguments: str | None = absent()
    name: str | None = absent()


RESPONSE_EVENTS = (ResponseStateEvent, OutputItemEvent, ContentPartEvent, TextEvent, ArgumentsEvent)
