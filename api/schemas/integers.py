"""Reads JSON numbers where integers must be: JSON has only one type of number."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin


def takes_integers(hint: Any) -> bool:
    """Returns whether a field of this type holds an integer or a list of integers, but no float."""
    origin = get_origin(hint)
    if origin in (Union, UnionType, list):
        return any(takes_integers(each) for each in get_args(hint))
    return takes_integers(get_args(hint)[0]) if origin is Annotated else hint is int


def with_integers(value: Any) -> Any:
    """Converts whole numbers such as 5.0 to integers, also inside lists."""
    if isinstance(value, list):
        return [with_integers(each) for each in value] if any(type(each) in (float, list) for each in value) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
