"""Defines the bodies of `POST /v1/responses` and of the conversation routes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from graftwork.api.schemas.base import (
    COMPLETION_UNSUPPORTED,
    EndUserBody,
    FieldError,
    OpenAiBody,
    SamplingBody,
    TierName,
    refuse_unsupported,
)
from graftwork.api.schemas.input_items import InputItemJson
from graftwork.api.schemas.response_tools import ResponseTools
from graftwork.api.schemas.sessions import Metadata
from graftwork.api.schemas.shapes import ResponseToolChoiceJson, TextFormatJson, given, having, never, positive
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.input import MAX_INPUT_ITEMS, ignored_items, read_input
from graftwork.sessions.responses.record import NewResponse
from graftwork.sessions.responses.references import InputEntry
from graftwork.sessions.responses.tools import PlacedTool, ignored_tools, is_hosted, placed_tools
from graftwork.sessions.tools.tool_choice import qualified_name

_UNSUPPORTED = {
    **{field: is_neutral for field, is_neutral in COMPLETION_UNSUPPORTED.items() if field != "top_logprobs"},
    **dict.fromkeys(
        (
            "response_format",
            "regex",
            "grammar",
            "structural_tag",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        ),
        lambda value: not value,
    ),
    "prompt_logprobs": lambda value: value is None,
    "prompt": lambda value: value is None,
    "context_management": lambda value: not value,
}


_LOGPROBS = "message.output_text.logprobs"
_INCLUDES_LOGPROBS = {
    "required": ["include"],
    "properties": {"include": {"type": "array", "items": {}, "contains": {"const": _LOGPROBS}}},
}
_NAMED_TYPES = ("function", "custom")
"""The types of a `tool_choice` that names one tool."""


class ConversationReference(OpenAiBody):
    """An object that names a conversation by its id."""

    id: str
    """The id of the conversation."""


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


class ResponseRequest(SamplingBody, EndUserBody):
    """The body of a request that creates a response. A null field counts as missing.

    The server ignores fields that do not change the answer, such as `reasoning`.
    """

    model_config = ConfigDict(
        json_schema_extra=never(
            [given("conversation"), given("previous_response_id")],
            [given("conversation"), having("store", False)],
            [having("background", True), having("store", False)],
            [positive("top_logprobs"), {"not": _INCLUDES_LOGPROBS}],
        )
    )

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
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoiceJson = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` adds log-probabilities to the text. The server ignores other values."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """How many likely tokens to report beside each token, if `include` asks for log-probabilities."""
    metadata: Metadata | None = None
    service_tier: TierName | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """With `auto`, a prompt that does not fit in the context leaves out the oldest items; the history stays whole.

    System and developer messages stay, and so do calls whose output stays. By default such a prompt is an error.
    """

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, _UNSUPPORTED)

    @field_validator("tool_choice")
    @classmethod
    def check_tool_choice(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if value in (None, "auto", "none", "required"):
            return value
        if isinstance(value, dict) and value.get("type") in _NAMED_TYPES and isinstance(value.get("name"), str):
            return value
        if isinstance(value, dict) and is_hosted(value.get("type")):
            raise ValueError(f"the tool {value['type']!r} is not served here; leave it out")
        if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
            return value
        raise ValueError(
            "must be 'auto', 'none', 'required', {'type': 'function' or 'custom', 'name': …} or "
            "{'type': 'allowed_tools', …}"
        )

    @model_validator(mode="after")
    def check_combinations(self) -> "ResponseRequest":
        if self.top_logprobs and self.num_logprobs is None:
            raise FieldError("top_logprobs", f"add {_LOGPROBS!r} to `include` to get any")
        if self.conversation is not None and self.previous_response_id is not None:
            raise FieldError("previous_response_id", "a response goes on from a response or in a conversation")
        if self.store is False and self.background:
            raise FieldError("background", "a response that is not stored cannot be fetched later")
        if self.store is False and self.conversation is not None:
            raise FieldError("conversation", "a conversation keeps its responses: leave `store` out")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many likely tokens to report beside each token; None reports no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation

    def order(self, service_tier: str) -> NewResponse:
        """Converts the request to a NewResponse, which the response service takes.

        `service_tier` is the tier that serves the response. Raises ValidationFailed if `input` is invalid.
        """
        tools = tuple(placed_tools(self._tools_as_sent))
        return NewResponse(
            model=self.model,
            items=read_input(self.input),
            settings=self._settings(tools, service_tier),
            tool_paths=tuple(placed.path for placed in tools),
            ignored=(*ignored_tools(self._tools_as_sent), *ignored_items(self.input)),
            echo=self._echo(service_tier),
            is_stored=self.store is not False,
            is_background=bool(self.background),
            previous_response_id=self.previous_response_id,
            conversation_id=self.conversation_id,
            end_user=self.end_user,
            names_tools=self.tools is not None,
        )

    @property
    def _tools_as_sent(self) -> list[dict[str, Any]]:
        return [tool.model_dump() for tool in self.tools or ()]

    def _settings(self, tools: Sequence[PlacedTool], service_tier: str) -> SessionSettings:
        sampling = self.sent()
        sampling.pop("max_tokens", None)  # this API has `max_output_tokens` instead
        if self.max_output_tokens is not None:
            sampling["max_completion_tokens"] = self.max_output_tokens
        return SessionSettings(
            instructions=self.instructions,
            tools=tuple(placed.tool for placed in tools),
            tool_choice=_choice_in_chat_form(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=None if self.text is None else self.text.chat_form(),
            sampling=sampling,
            num_logprobs=self.num_logprobs,
            truncates_history=self.truncation == "auto",
            service_tier=service_tier,
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
            "tools": [echo for tool in self.tools or () if (echo := tool.echo()) is not None],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
        }


class ConversationBody(OpenAiBody):
    """The body of a request that creates a conversation."""

    items: Annotated[list[InputItemJson], Field(json_schema_extra={"maxItems": MAX_INPUT_ITEMS})] | None = None
    """The first items of the conversation, oldest first."""
    metadata: Metadata | None = None

    def first_items(self) -> tuple[InputEntry, ...]:
        """Returns the items with which the new conversation starts. Raises ValidationFailed for invalid items."""
        return read_input(self.items, "items") if self.items else ()


class ConversationItemsBody(OpenAiBody):
    """The body of a request that adds items to a conversation."""

    items: Annotated[list[InputItemJson], Field(json_schema_extra={"minItems": 1, "maxItems": MAX_INPUT_ITEMS})]
    """The new items, oldest first. They come after the last item of the conversation."""


class ConversationPatch(OpenAiBody):
    """The body of a request that changes a conversation. Only the metadata can change."""

    metadata: Metadata


def _choice_in_chat_form(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice or "auto"
    if choice["type"] in _NAMED_TYPES:
        return _named_in_chat_form(choice)
    served = [tool for tool in choice["tools"] if not (isinstance(tool, Mapping) and is_hosted(tool.get("type")))]
    tools = [_named_in_chat_form(tool) for tool in served]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _named_in_chat_form(named: Any) -> dict[str, Any]:
    """Returns a tool that `tool_choice` names. A tool of a namespace has `namespace`, or its name has both."""
    name = named.get("name") if isinstance(named, Mapping) else None
    if isinstance(name, str) and isinstance(named.get("namespace"), str):
        name = qualified_name(named["namespace"], name)
    return {"type": "function", "function": {"name": name}}
