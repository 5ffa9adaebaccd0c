"""Reads JSON from clients that are not trusted.

`read_object` reads the files of an upload. It refuses text that other JSON readers may refuse or understand
differently: repeated keys, NaN and Infinity. `parse_json` reads the body of a request. It refuses NaN and Infinity, half
of a surrogate pair, which a database or a tokenizer could not store, and bodies that nest too deep or have too many
values. Both refuse integers with thousands of digits.
Blocks its thread until it ends, so `json_worker.py` parses long bodies in another process.
"""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from graftwork.platform.errors import InvalidRequest, ValidationFailed


class _Refused(ValueError):
    """Raised inside the parser's hooks for JSON that is refused."""


def read_object(raw: bytes, param: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ValidationFailed if `raw` is anything else. `param` is the field that the error
    names.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValidationFailed(f"{param}: the JSON is nested too deeply.", param=param) from None
    except ValueError as error:  # also UnicodeDecodeError, and integers of too many digits
        raise ValidationFailed(f"{param}: not readable as JSON: {str(error)[:300]}", param=param) from None
    if not isinstance(value, dict):
        raise ValidationFailed(f"{param}: must be a JSON object.", param=param)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"the key {key[:200]!a} occurs twice")
        found[key] = value
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise _Refused(f"{constant} is not a JSON value")


MAX_DEPTH = 64
"""The most levels of nested lists and objects in a body. Real JSON Schemas have fewer than 20 levels."""
MAX_CONTAINERS = 50_000
"""The most lists and objects in a body. A conversation of 1000 tool calls has fewer than 10,000."""
MAX_VALUES = 300_000
"""The most values in all lists and objects of a body together."""


def parse_json(body: bytes | bytearray) -> Any:
    """Parses the body of a request as strict JSON. Raises InvalidRequest with the reason."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise InvalidRequest("The body is not UTF-8: send JSON encoded as UTF-8.", code="invalid_json") from error
    except ValueError as error:  # json.JSONDecodeError, and integers of more than 4300 digits
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    _check_shape(value)
    if b"\\u" in body:
        _refuse_lone_surrogates(value)
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels: flatten it.", code="invalid_json")


def _check_shape(value: Any) -> None:
    """Checks the depth and the numbers of containers and values. Uses no recursion, which could overflow the stack.

    Raises InvalidRequest.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    depth = num_containers = num_values = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        num_containers += len(level)
        num_values += sum(map(len, level))
        if num_containers > MAX_CONTAINERS:
            raise _too_many(MAX_CONTAINERS, "lists and objects")
        if num_values > MAX_VALUES:
            raise _too_many(MAX_VALUES, "values")
        level = [child for container in level for child in _children(container) if isinstance(child, (dict, list))]


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _too_many(limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"The body has more than {limit} {what}: send fewer.", code="invalid_json")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The body holds half of a surrogate pair: send whole characters."
        raise InvalidRequest(message, code="invalid_json") from None
