"""Defines the base classes of request bodies.

All bodies are strict. They refuse NaN, and text where a number must be. Bodies of OpenAI-compatible routes ignore
unknown fields. Bodies of native and admin routes refuse unknown fields.
"""

from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from graftwork.sessions.generation.sampling import SamplingFields


class RequestBody(BaseModel):
    """The base of all bodies. JSON has only one type of number, so an integer field accepts 5.0, but not 5.5."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def read_integral_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        return with_integers(value) if _takes_integers(field.annotation) else value


class OpenAiBody(RequestBody):
    """A body of an OpenAI-compatible route. It ignores unknown fields, because newer clients may send more fields."""

    model_config = ConfigDict(extra="ignore")


class NativeBody(RequestBody):
    """A body of a native or admin route. It refuses unknown fields, because they may be spelling mistakes."""

    model_config = ConfigDict(extra="forbid")


class SamplingBody(SamplingFields, OpenAiBody):
    """A body of an OpenAI-compatible route that generates text. It has the sampling fields."""

    @model_validator(mode="after")
    def minimum_within_maximum(self) -> Self:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise FieldError("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        return self


class FieldError(ValueError):
    """An error that names a wrong field and the reason. Validators that check several fields raise it."""

    def __init__(self, field: str, explanation: str) -> None:
        super().__init__(explanation)
        self.field = field


def given(field: str) -> dict[str, Any]:
    """Return the JSON Schema of a body that has this field with a value other than null."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def _takes_integers(hint: Any) -> bool:
    """Return whether a field of this type holds an integer or a list of integers, but no float."""
    origin = get_origin(hint)
    if origin in (Union, UnionType, list):
        return any(_takes_integers(each) for each in get_args(hint))
    return _takes_integers(get_args(hint)[0]) if origin is Annotated else hint is int


def with_integers(value: Any) -> Any:
    """Convert whole numbers such as 5.0 to integers, also inside lists."""
    if isinstance(value, list):
        return [with_integers(each) for each in value] if any(type(each) in (float, list) for each in value) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
