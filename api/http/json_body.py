"""Parses JSON bodies and refuses dangerous ones.

Refuses bodies that are not UTF-8 JSON, that nest deeper than `MAX_DEPTH`, or that hold NaN, Infinity, half a surrogate
pair or an integer of thousands of digits. Python parses all of these, and a database or tokenizer fails on them later.
"""

import json
from typing import Any, NoReturn

from graftwork.platform.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of lists and objects. Real JSON Schemas have fewer than 20."""


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises InvalidRequest, which says what is wrong."""
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
    """Walk level by level, because recursion would overflow the stack on deep values."""
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
