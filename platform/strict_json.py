"""Reads JSON from clients that are not trusted.

Refuses text that other JSON readers may refuse or understand differently: repeated keys, NaN and Infinity. Also refuses
text that costs too much to read: very long numbers and very deep nesting.
"""

import json
from typing import Any, NoReturn

from graftwork.platform.errors import ValidationFailed


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
    raise _Refused(f"{constant} is not JSON")
