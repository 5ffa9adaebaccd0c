"""Translates requests of Anthropic's API to chat completion requests.

Also translates the field names in errors back to Anthropic's names. Never generates an answer.
After the translation, the same code serves both APIs. So each feature of chat completions also works in Anthropic's
API.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graftwork.api.anthropic.cache_control import longest_ttl_s
from graftwork.api.anthropic.hints import ignored_places
from graftwork.api.anthropic.messages import chat_messages
from graftwork.api.anthropic.schemas import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    OutputFormat,
    ThinkingConfig,
    ToolChoice,
)
from graftwork.api.anthropic.tools import choose_tools
from graftwork.api.http.validation import checked_body
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.sessions.generation.reasoning import switched

_TIERS = {"auto": "auto", "standard_only": "default"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_RENAMED = (
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^thinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"^response_format\b(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^parallel_tool_calls\b"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)
"""Pairs of a pattern for a field of chat completions, and the name of Anthropic's field that replaces it."""

_TOOL_INDEX = re.compile(r"^tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Translation:
    """A request in Anthropic's form as a chat completion request, and what was lost."""

    chat: ChatCompletionRequest
    ignored: tuple[str, ...]
    """The parts of the request that the server ignores, for the header `x-graftwork-ignored`."""
    names: "FieldNames"
    cache_ttl_s: float | None
    """For how many seconds the client asks the server to keep the prompt in its cache; None if it does not ask."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Converts the names of fields of the chat completion request to the names of the request in Anthropic's form."""

    tool_indices: Sequence[int]
    """For each tool of the chat completion request, its index in the request's own `tools`."""

    def __call__(self, field: str) -> str:
        return anthropic_names(_TOOL_INDEX.sub(self._own_index, field))

    def rename(self, error: InvalidRequest) -> InvalidRequest:
        """Returns the same error, but with Anthropic's name of the wrong field."""
        return _renamed(error, self)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Renames the field of an InvalidRequest that is raised inside the block."""
        try:
            yield
        except InvalidRequest as error:
            raise self.rename(error) from error

    def _own_index(self, match: re.Match[str]) -> str:
        index = int(match.group(1))
        return f"tools[{self.tool_indices[index] if index < len(self.tool_indices) else index}]"


def translate(body: CountTokensRequest, headers: Mapping[str, str], *, reasons: bool = False) -> Translation:
    """Translates a request in Anthropic's form to a chat completion request. `headers` are those of the HTTP request.

    `reasons` says whether the model reasons; if not, the field `thinking` is ignored.
    Raises InvalidRequest for an invalid field. The error names the field as in Anthropic's API.
    """
    if body.thread is not None:
        raise _no_threads()
    chosen = choose_tools(body)
    fields = chat_body(body, [tool for _, tool in chosen.tools])
    if reasons and body.thinking is not None:
        fields |= _thinking(body.thinking)
    names = FieldNames([index for index, _ in chosen.tools])
    try:
        chat = checked_body(ChatCompletionRequest, fields)
    except InvalidRequest as error:
        raise names.rename(error) from error
    return Translation(
        chat, (*chosen.ignored, *ignored_places(body, headers, reasons=reasons)), names, longest_ttl_s(body)
    )


def chat_body(body: CountTokensRequest, tools: Sequence[CustomTool]) -> dict[str, Any]:
    """Returns the body of a chat completion request, as a dict, for a body in Anthropic's form.

    `tools` are the tools that the model sees. Leaves out the fields that the client did not set.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
    if not fields["messages"]:
        raise InvalidRequest(
            "messages has no message that the model sees: send one of the user's, or a system message with text.",
            param="messages",
        )
    if body.continues_last_message:
        _check_last_message(body, fields["messages"][-1])
        fields["continue_final_message"] = True
    if tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.metadata is not None and body.metadata.user_id:
        fields["user"] = body.metadata.user_id
    if body.answer_format is not None:
        fields["response_format"] = _response_format(body.answer_format)
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body)
    return fields


def _no_threads() -> InvalidRequest:
    """Returns the error by which Anthropic's SDK knows that it must send the whole conversation without `thread`."""
    code = "thread_unsupported_request"
    return InvalidRequest(
        "thread is not served: this server keeps no messages of a conversation. Leave it out, and send all messages.",
        param="thread",
        code=code,
        details={"error_code": code, "unsupported": ["thread"]},
    )


def _check_last_message(body: CountTokensRequest, last: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if the answer cannot continue the last message, which is the assistant's."""
    param = f"messages[{len(body.messages) - 1}]"
    if "tool_calls" in last:
        raise InvalidRequest(
            f"{param} calls tools, so the answer cannot continue it: send the results in a message of the user.",
            param=param,
        )
    if not last["content"]:
        raise InvalidRequest(f"{param} has no text that the answer could continue: leave it out.", param=param)
    if body.answer_format is not None:
        raise InvalidRequest(
            f"output_config.format is the format of a whole answer, but the answer continues {param}: leave one of "
            "them out.",
            param="output_config.format",
        )


def _thinking(asked: ThinkingConfig) -> Mapping[str, Any]:
    """Returns the chat's fields for `thinking`. A type such as `adaptive` leaves it to the model's chat template."""
    if asked.type not in ("enabled", "disabled"):
        return {}
    is_on = asked.type == "enabled"
    budget = {"thinking_token_budget": asked.budget_tokens} if is_on and asked.budget_tokens is not None else {}
    return {"chat_template_kwargs": switched(is_on=is_on), **budget}


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
    return _renamed(error, anthropic_names)


def _renamed(error: InvalidRequest, rename: Callable[[str], str]) -> InvalidRequest:
    if error.param is None or isinstance(error, ContextLengthExceeded):
        return error
    theirs = rename(error.param)
    message = error.message.replace(error.param, theirs, 1)
    return InvalidRequest(message, param=theirs, code=error.code, details=error.details)
