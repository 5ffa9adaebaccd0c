"""Defines the bodies of `POST /v1/responses` and of the conversation routes."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from graftwork.api.schemas.base import (
    COMPLETION_UNSUPPORTED,
    FieldError,
    OpenAiBody,
    SamplingBody,
    refuse_unsupported,
)
from graftwork.api.schemas.sessions import Metadata
from graftwork.api.schemas.shapes import InputItemJson, ResponseToolChoiceJson, TextFormatJson
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.input import MAX_INPUT_ITEMS, read_input
from graftwork.sessions.responses.record import NewResponse
from graftwork.sessions.responses.references import InputEntry
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, TOOL_NAME

_UNSUPPORTED = {
    **COMPLETION_UNSUPPORTED,
    **dict.fromkeys(("response_format", "regex", "grammar", "structural_tag"), lambda value: not value),
    "truncation": lambda value: value in (None, "disabled"),
    "prompt": lambda value: value is None,
    "context_management": lambda value: not value,
    "include": lambda value: not (isinstance(value, list) and "message.output_text.logprobs" in value),
}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


class ConversationReference(OpenAiBody):
    """An object that names a conversation by its id."""

    id: str
    """The id of the conversation."""


class ResponseTool(OpenAiBody):
    """A tool that the client itself runs. The server refuses OpenAI's built-in tools, which have other types."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    """The name that the model calls. No two tools of a request have the same name."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema for the arguments. The model sees it unchanged."""
    strict: bool | None = None

    def chat_form(self) -> dict[str, Any]:
        """Returns the tool in the form of chat completions.

        Leaves out `strict: false`, which means the same as a missing `strict`.
        """
        given = {field: getattr(self, field) for field in _TOOL_FIELDS}
        function = {field: value for field, value in given.items() if value is not None and value is not False}
        return {"type": "function", "function": function}

    def echo(self) -> dict[str, Any]:
        return {"type": self.type, **{field: getattr(self, field) for field in _TOOL_FIELDS}}


class TextOptions(OpenAiBody):
    """The settings of the answer's text. Only the format can be set."""

    format: TextFormatJson = None

    def chat_form(self) -> dict[str, Any] | None:
        """Returns the answer format in the form of chat completions, where a schema is in an object `json_schema`.

        Returns None if the request sets no format.
        """
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        return {
            "type": "json_schema",
            "json_schema": {name: self.format[name] for name in self.format if name != "type"},
        }


class ResponseRequest(SamplingBody):
    """The body of a request that creates a response. A null field counts as missing.

    The server ignores fields that do not change the answer, such as `user` and `reasoning`.
    """

    model: str
    input: str | Annotated[list[InputItemJson], Field(json_schema_extra={"minItems": 1, "maxItems": MAX_INPUT_ITEMS})]
    instructions: str | None = None
    previous_response_id: str | None = None
    """The response that this one continues. A request with this field cannot have `conversation`."""
    conversation: str | ConversationReference | None = None
    """The conversation that gets this response, as an id or an object."""
    store: bool | None = None
    """If false, the server does not keep the response. The default is true."""
    background: bool | None = None
    """If true, the server answers at once, and the client fetches the response later."""
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """The most tokens to generate."""
    tools: Annotated[list[ResponseTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ResponseToolChoiceJson = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: Metadata | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, _UNSUPPORTED)

    @field_validator("tool_choice")
    @classmethod
    def check_tool_choice(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if value in (None, "auto", "none", "required"):
            return value
        if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
            return value
        if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
            return value
        raise ValueError(
            "must be 'auto', 'none', 'required', {'type': 'function', 'name': …} or {'type': 'allowed_tools', …}"
        )

    @model_validator(mode="after")
    def check_combinations(self) -> "ResponseRequest":
        if self.conversation is not None and self.previous_response_id is not None:
            raise FieldError("previous_response_id", "a response goes on from a response or in a conversation")
        if self.store is False and self.background:
            raise FieldError("background", "a response that is not stored cannot be fetched later")
        if self.store is False and self.conversation is not None:
            raise FieldError("conversation", "a conversation keeps its responses: leave `store` out")
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation

    def order(self, service_tier: str) -> NewResponse:
        """Converts the request to a NewResponse, which the response service takes.

        `service_tier` is the tier that the answer reports. Raises ValidationFailed if `input` is invalid.
        """
        return NewResponse(
            model=self.model,
            items=read_input(self.input),
            settings=self._settings(),
            echo=self._echo(service_tier),
            is_stored=self.store is not False,
            is_background=bool(self.background),
            previous_response_id=self.previous_response_id,
            conversation_id=self.conversation_id,
        )

    def _settings(self) -> SessionSettings:
        sampling = self.sent()
        sampling.pop("max_tokens", None)  # this API has `max_output_tokens` instead
        if self.max_output_tokens is not None:
            sampling["max_completion_tokens"] = self.max_output_tokens
        return SessionSettings(
            instructions=self.instructions,
            tools=tuple(tool.chat_form() for tool in self.tools or ()),
            tool_choice=_choice_in_chat_form(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=None if self.text is None else self.text.chat_form(),
            sampling=sampling,
        )

    def _echo(self, service_tier: str) -> dict[str, Any]:
        """Returns the fields of the request that the answer repeats, with the defaults filled in."""
        text_format = None if self.text is None else self.text.format
        return {
            "background": bool(self.background),
            "conversation": None if self.conversation_id is None else {"id": self.conversation_id},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": service_tier,
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.echo() for tool in self.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


class ConversationBody(OpenAiBody):
    """The body of a request that creates a conversation."""

    items: Annotated[list[InputItemJson], Field(json_schema_extra={"maxItems": MAX_INPUT_ITEMS})] | None = None
    """The first items of the conversation, oldest first."""
    metadata: Metadata | None = None

    def first_items(self) -> tuple[InputEntry, ...]:
        """Returns the items with which the new conversation starts. Raises ValidationFailed for invalid items."""
        return read_input(self.items, "items") if self.items else ()


class ConversationPatch(OpenAiBody):
    """The body of a request that changes a conversation. Only the metadata can change."""

    metadata: Metadata


def _choice_in_chat_form(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice or "auto"
    if choice["type"] == "function":
        return _named_in_chat_form(choice)
    tools = [_named_in_chat_form(tool) for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _named_in_chat_form(named: Any) -> dict[str, Any]:
    name = named.get("name") if isinstance(named, Mapping) else None
    return {"type": "function", "function": {"name": name}}
