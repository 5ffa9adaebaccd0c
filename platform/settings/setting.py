"""One setting: a field of a dataclass that knows how its value is read.

Owns nothing. The rooms' other modules declare the settings of one subject each, and `settings.py` joins them.
"""

from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, TypeVar

Value = TypeVar("Value")


def setting(default: Value, parse: Callable[[object], object], *, is_secret: bool = False) -> Value:
    """Returns the field of a dataclass for one setting.

    `parse` makes the value from a text of the environment, or from what the command line gives; it raises ValueError or
    TypeError for a value that cannot be used. A secret is not shown in the settings' repr, nor in errors. An empty
    dictionary as the default is copied for each object.
    """
    options: dict[str, Any] = {"metadata": {"parse": parse}, "repr": not is_secret}
    options |= {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    declared: Any = field(**options)  # a dataclass puts a value of the type `Value` in its place
    made: Value = declared
    return made


def parse_field(declared: "Field[Any]", value: object) -> object:
    """Returns `value` in the type of the setting. Raises ValueError or TypeError if it cannot be used."""
    parse: Callable[[object], object] = declared.metadata["parse"]
    return parse(value)
