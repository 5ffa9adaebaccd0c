"""The answers of the Responses API: responses, their events, and conversations."""

from typing import Any, Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.sessions import ContentPart, Item

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(Answer):
    """Why a response failed."""

    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """How the answer's tokens were used. This server counts none as reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """The tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseConversation(Answer):
    """The conversation that a response belongs to."""

    id: str


class ResponseState(Answer):
    """A response, running or ended. It repeats the request's fields, with their defaults filled in."""

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
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Conversation(Answer):
    """A conversation that responses are given in."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Answer):
    """A conversation that was deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ResponseEvent(Answer):
    """Base of a response's events. `sequence_number` starts at 0 and has no gaps within a response."""

    type: str
    sequence_number: int


class ResponseStateEvent(ResponseEvent):
    """The response came to a new state. `completed`, `incomplete` and `failed` are the last event."""

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
    """An item began or ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class ContentPartEvent(ResponseEvent):
    """A part of a message began or ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextEvent(ResponseEvent):
    """More of a message's text in `delta`, or all of it in `text`."""

    type: Literal["response.output_text.delta", "response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    delta: str | None = absent()
    text: str | None = absent()
    logprobs: tuple[dict[str, Any], ...]


class ArgumentsEvent(ResponseEvent):
    """More of a call's arguments in `delta`, or all of them in `arguments`, as JSON text."""

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    item_id: str
    output_index: int
    delta: str | None = absent()
    arguments: str | None = absent()
    name: str | None = absent()


RESPONSE_EVENTS = (ResponseStateEvent, OutputItemEvent, ContentPartEvent, TextEvent, ArgumentsEvent)
