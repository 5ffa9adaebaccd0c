"""Errors and the state of the server, as every route answers them."""

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic reads this one only, before Python 3.12

from graftwork.platform.answers.base import Answer


@with_config(ConfigDict(extra="allow"))
class ErrorFields(TypedDict):
    """What went wrong. A conflict or a spent limit has further fields beside these four."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error, on all routes but Anthropic's."""

    error: ErrorFields


class AnthropicErrorFields(Answer):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class AnthropicErrorAnswer(Answer):
    """Every error of `/v1/messages`."""

    type: Literal["error"] = "error"
    error: AnthropicErrorFields
    request_id: str


class Health(Answer):
    """The process is up."""

    status: Literal["ok"] = "ok"


class Ready(Answer):
    """The server can serve."""

    status: Literal["ready"] = "ready"


class NotReady(Answer):
    """The server cannot serve. `problems` has one entry for each part that fails."""

    status: Literal["not_ready"] = "not_ready"
    problems: dict[str, str]


class Version(Answer):
    """The server's version."""

    version: str
