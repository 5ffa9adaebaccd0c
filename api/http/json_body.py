"""JSON from strangers: parsed once, and refused before anything downstream can choke on it.

Refused are bodies that are not UTF-8 JSON, that nest deeper than `MAX_DEPTH`, and that hold NaN, Infinity, lone
surrogates or integers of absurd length: each of these parses in Python and fails later, in a database or a tokenizer.
"""

import json
from typing import Any, NoReturn

from graftwork.platform.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of lists and objects; JSON Schemas in the wild stay below 20."""


def parse_json(body: bytes) -> Any:
    """Raises InvalidRequest that says what is wrong with the bytes."""
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
    """Walks level by level, so that the depth of the value never becomes the depth of the stack."""
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
