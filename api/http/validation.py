"""Converts the validation errors of pydantic to one error, which names the field as the client wrote it.

Never validates anything itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from graftwork.api.schemas.base import FieldError
from graftwork.platform.errors import ContextLengthExceeded, GraftworkError, InvalidRequest, ValidationFailed

Body = TypeVar("Body", bound=BaseModel)

_MOST_NAMED = 5
"""The most problems that one error message lists."""


def invalid_body(error: RequestValidationError) -> InvalidRequest:
    """Converts all problems that pydantic found in a body to one error.

    `param` of the error names the first wrong field.
    """
    complaints = _complaints(error)
    return InvalidRequest(_message(complaints), param=complaints[0][0])


def checked_body(model: type[Body], fields: Mapping[str, Any]) -> Body:
    """Returns a body that did not come as the body of an HTTP request.

    Raises InvalidRequest, which names the first wrong field.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        complaints = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        raise invalid_body(RequestValidationError(complaints, body=fields)) from error


def as_invalid_request(error: InvalidRequest | ValidationFailed) -> InvalidRequest:
    """Returns the same error with the status 400, for OpenAI-compatible routes."""
    if isinstance(error, InvalidRequest):
        return error
    code = None if error.code == ValidationFailed.default_code else error.code
    return InvalidRequest(error.message, param=error.param, code=code, details=error.details)


def as_validation_failed(error: InvalidRequest | ValidationFailed) -> GraftworkError:
    """Returns the same error with the status 422, for the routes of Graftwork's own API.

    The error of a prompt that is too long keeps the status 400.
    """
    if isinstance(error, ValidationFailed | ContextLengthExceeded):
        return error
    code = None if error.code == InvalidRequest.default_code else error.code
    return ValidationFailed(error.message, param=error.param, code=code, details=error.details)


def _complaints(error: RequestValidationError) -> list[tuple[str | None, str]]:
    """Returns a list of the wrong fields and their problems, in pydantic's order and without duplicates."""
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
    """Returns the path of the wrong field in the body. Leaves out the union tags that pydantic adds to a path."""
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
    """Writes a path as OpenAI does, such as `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _holds(value: Any, part: int | str) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
