"""Parses JSON bodies, and refuses bodies that would cause a failure later.

Refuses a body that is not UTF-8 JSON, or that nests deeper than `MAX_DEPTH`. Refuses NaN, Infinity, half of a surrogate
pair, and integers with thousands of digits. Python could parse most of these, but a database or a tokenizer would fail.
"""

import json
from typing import Any, NoReturn

from graftwork.platform.errors import InvalidRequest

MAX_DEPTH = 64
"""The highest number of nested lists and objects. Real JSON Schemas have fewer than 20 levels."""


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises InvalidRequest with the reason."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise InvalidRequest("The body is not UTF-8: send JSON encoded as UTF-8.", code="invalid_json") from error
    except ValueError as error:  # json.JSONDecodeError, and integers of more than 4300 digits
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if _depth_exceeds(value, MAX_DEPTH):
        raise _too_deep()
    if b"\\u" in body:
        _refuse_lone_surrogates(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels: flatten it.", code="invalid_json")


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Return whether a value nests deeper than `limit`. Uses no recursion, which could overflow the stack."""
    level = [value]
    for _ in range(limit):
        level = [child for container in level for child in _children(container)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, (dict, list))]
    if isinstance(value, list):
        return [child for child in value if isinstance(child, (dict, list))]
    return []


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The body holds half of a surrogate pair: send whole characters."
        raise InvalidRequest(message, code="invalid_json") from None
