"""Defines the answers of failed requests, and the answers about the server's own state."""

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # before Python 3.12, pydantic needs the class of typing_extensions

from graftwork.platform.answers.base import Answer


@with_config(ConfigDict(extra="allow"))
class ErrorFields(TypedDict):
    """The description of an error. A conflict or a reached limit adds more fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The answer of a failed request, on all routes except `/v1/messages`."""

    error: ErrorFields


class AnthropicErrorFields(Answer):
    """The cause of an error, with the error types of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorAnswer(Answer):
    """The answer of a failed request to `/v1/messages`."""

    type: Literal["error"] = "error"
    error: AnthropicErrorFields
    request_id: str


class Health(Answer):
    """The server's process is running."""

    status: Literal["ok"] = "ok"


class Ready(Answer):
    """The server can serve requests."""

    status: Literal["ready"] = "ready"


class NotReady(Answer):
    """The server cannot serve requests. `problems` has one entry for each part that fails."""

    status: Literal["not_ready"] = "not_ready"
    problems: dict[str, str]


class Version(Answer):
    """The server's version."""

    version: str
