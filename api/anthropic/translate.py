"""Translates requests of Anthropic's API to chat completion requests.

Also translates the field names in errors back to Anthropic's names. Never generates an answer.
After the translation, the same code serves both APIs. So each feature of chat completions also works in Anthropic's
API.
"""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from graftwork.api.anthropic.messages import chat_messages
from graftwork.api.anthropic.schemas import CountTokensRequest, CustomTool, MessagesRequest, OutputFormat, ToolChoice
from graftwork.api.http.validation import invalid_body
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.platform.errors import InvalidRequest

_TIERS = {"auto": "auto", "standard_only": "default"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_RENAMED = (
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^response_format\b(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^parallel_tool_calls\b"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)
"""Pairs of a pattern for a field of chat completions, and the name of Anthropic's field that replaces it."""


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Translates the body of a request in Anthropic's form to a chat completion request.

    Raises InvalidRequest for an invalid field. The error names the field as in Anthropic's API.
    """
    translated = chat_body(body)
    try:
        return ChatCompletionRequest.model_validate(translated)
    except ValidationError as error:
        complaints = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        raise with_anthropic_fields(invalid_body(RequestValidationError(complaints, body=translated))) from error


def chat_body(body: CountTokensRequest) -> dict[str, Any]:
    """Returns the body of a chat completion request, as a dict, for a body in Anthropic's form.

    Leaves out the fields that the client did not set.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
    if body.tools is not None:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.format is not None:
        fields["response_format"] = _response_format(body.output_config.format)
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body)
    return fields


def _sampling(body: MessagesRequest) -> Mapping[str, Any]:
    given = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "service_tier": None if body.service_tier is None else _TIERS[body.service_tier],
    }
    return {name: value for name, value in given.items() if value is not None}


def _tool(tool: CustomTool) -> dict[str, Any]:
    optional = {"description": tool.description, "strict": tool.strict}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **given, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _response_format(wanted: OutputFormat) -> dict[str, Any]:
    schema = {"name": "output", "strict": True, "schema": wanted.schema_}
    return {"type": "json_schema", "json_schema": schema}


def anthropic_names(field: str) -> str:
    """Converts the name of a field of chat completions, such as `stop`, to Anthropic's name, such as `stop_sequences`.

    Returns a name unchanged if both APIs use the same name.
    """
    for pattern, name in _RENAMED:
        field = pattern.sub(name, field)
    return field


def with_anthropic_fields(error: InvalidRequest) -> InvalidRequest:
    """Returns the same error, but with Anthropic's name of the wrong field."""
    if error.param is None:
        return error
    theirs = anthropic_names(error.param)
    message = error.message.replace(error.param, theirs, 1)
    return InvalidRequest(message, param=theirs, code=error.code, details=error.details)
