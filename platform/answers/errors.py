"""Defines the JSON answers of failed requests, and of the routes that show the server's health and version."""

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # before Python 3.12, pydantic needs the class of typing_extensions

from graftwork.platform.answers.base import Answer, absent


@with_config(ConfigDict(extra="allow"))
class ErrorFields(TypedDict):
    """The fields of an error. Some errors, such as a conflict or a reached limit, have further fields with details."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The answer to a failed request, on all routes except those with Anthropic's form."""

    error: ErrorFields


class AnthropicErrorFields(Answer):
    """The type and the message of an error, as in Anthropic's API."""

    type: str
    message: str
    details: "AnthropicErrorDetails | None" = absent()


class AnthropicErrorDetails(Answer):
    """Tells a program which of the known errors this is, and which fields of the request caused it."""

    error_code: str
    unsupported: tuple[str, ...]


class AnthropicErrorAnswer(Answer):
    """The answer to a failed request in the form of Anthropic's API: on `/v1/messages` and the paths below it, and on
    `/v1/models` for a request with the header `anthropic-version`.
    """

    type: Literal["error"] = "error"
    error: AnthropicErrorFields
    request_id: str


class Health(Answer):
    """The answer of a server whose process is running."""

    status: Literal["ok"] = "ok"


class Ready(Answer):
    """The answer of a server that can serve requests.

    `degraded` names the degraded modes that the operator has set, such as `max_output_tokens=256` and `refuse_flex`.
    """

    status: Literal["ready"] = "ready"
    degraded: list[str]


class NotReady(Answer):
    """The answer of a server that cannot serve requests now.

    `problems` maps the name of each part that fails, such as the database, to a description of the problem.
    """

    status: Literal["not_ready"] = "not_ready"
    problems: dict[str, str]


class Version(Answer):
    """The answer that contains the version of the server."""

    version: str
