"""Fills an adapter's defaults into requests that say nothing else.

Owns what counts as saying something. Never reads the defaults: the registry does.
"""

from typing import Any, TypeVar

from graftwork.adapters.format.defaults import AdapterDefaults
from graftwork.api.schemas.base import FunctionTool
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.api.schemas.completions import CompletionRequest
from graftwork.sessions.text.messages import messages_from_chat
from graftwork.sessions.turns.settings import read_sampling

Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest)
_SYSTEM_ROLES = ("system", "developer")
_LENGTHS = ("max_tokens", "max_completion_tokens")


def chat_with_defaults(body: ChatCompletionRequest, defaults: AdapterDefaults) -> ChatCompletionRequest:
    """Returns the chat with the adapter's system prompt, tools, format and sampling, where the chat itself has none.

    Raises InvalidRequest for wrong messages, with the places that they have in the request.
    """
    changed: dict[str, Any] = {}
    if defaults.system and all(message.get("role") not in _SYSTEM_ROLES for message in body.messages):
        messages_from_chat(body.messages)
        changed["messages"] = [{"role": "system", "content": defaults.system}, *body.messages]
    if body.tools is None and defaults.tools:
        changed["tools"] = [FunctionTool.model_validate(tool) for tool in defaults.tools]
    return _with_sampling(body, defaults, changed)


def completion_with_defaults(body: CompletionRequest, defaults: AdapterDefaults) -> CompletionRequest:
    """Returns the completion with the adapter's format and sampling, where it has none itself."""
    return _with_sampling(body, defaults, {})


def _with_sampling(body: Body, defaults: AdapterDefaults, changed: dict[str, Any]) -> Body:
    says_nothing = body.response_format is None and body.response_format_fields().read() is None
    if defaults.response_format is not None and says_nothing:
        changed["response_format"] = dict(defaults.response_format)
    if defaults.sampling:
        fields = read_sampling(defaults.sampling)
        is_limited = any(getattr(body, name, None) is not None for name in _LENGTHS)
        for name in defaults.sampling.keys() & type(fields).model_fields.keys():
            value = getattr(fields, name)
            if (
                name in type(body).model_fields
                and getattr(body, name) is None
                and not (is_limited and name in _LENGTHS)
            ):
                changed[name] = value
    return body.model_copy(update=changed) if changed else body
