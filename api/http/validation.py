"""Turns pydantic's validation errors into one error that names the field as the caller wrote it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from graftwork.api.schemas.base import FieldError
from graftwork.platform.errors import ContextLengthExceeded, GraftworkError, InvalidRequest, ValidationFailed

_MOST_NAMED = 5
"""How many errors one message lists."""


def invalid_body(error: RequestValidationError) -> InvalidRequest:
    """All errors of a body as one error. `param` is the first field."""
    complaints = _complaints(error)
    return InvalidRequest(_message(complaints), param=complaints[0][0])


def as_invalid_request(error: InvalidRequest | ValidationFailed) -> InvalidRequest:
    """The same error as a 400, for OpenAI-compatible routes."""
    if isinstance(error, InvalidRequest):
        return error
    code = None if error.code == ValidationFailed.default_code else error.code
    return InvalidRequest(error.message, param=error.param, code=code, details=error.details)


def as_validation_failed(error: InvalidRequest | ValidationFailed) -> GraftworkError:
    """The same error as a 422, for native and admin routes. A prompt that is too long stays a 400."""
    if isinstance(error, ValidationFailed | ContextLengthExceeded):
        return error
    code = None if error.code == InvalidRequest.default_code else error.code
    return ValidationFailed(error.message, param=error.param, code=code, details=error.details)


def _complaints(error: RequestValidationError) -> list[tuple[str | None, str]]:
    """Pairs of a field and what is wrong with it, in pydantic's order, each once."""
    found: dict[tuple[str | None, str], None] = {}
    for entry in error.errors():
        found[(_field(entry, error.body), _explanation(entry))] = None
    return list(found) or [(None, "The request is not valid.")]


def _message(complaints: Sequence[tuple[str | None, str]]) -> str:
    lines = [explanation if field is None else f"{field}: {explanation}" for field, explanation in complaints]
    more = f" (and {len(lines) - _MOST_NAMED} more)" if len(lines) > _MOST_NAMED else ""
    return "; ".join(lines[:_MOST_NAMED]) + more


def _explanation(entry: Mapping[str, Any]) -> str:
    if entry["type"] == "extra_forbidden":
        return "unknown field; remove it"
    if entry["type"] == "missing":
        return "required, but missing"
    return str(entry["msg"]).removeprefix("Value error, ")


def _field(entry: Mapping[str, Any], body: Any) -> str | None:
    """The path of the field in the body, without the union tags that pydantic adds."""
    source, *parts = entry["loc"]
    if source != "body":
        return ".".join(str(part) for part in parts) or None
    value, path = body, list[int | str]()
    for position, part in enumerate(parts):
        is_last = position == len(parts) - 1
        if _holds(value, part):
            path.append(part)
            value = value[part]
        elif is_last and entry["type"] == "missing":
            path.append(part)
    complaint = entry.get("ctx", {}).get("error")
    if isinstance(complaint, FieldError):
        path.append(complaint.field)
    return _dotted(path) or None


def _dotted(path: Sequence[int | str]) -> str:
    """Write a path as OpenAI does, such as `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _holds(value: Any, part: int | str) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
