"""Defines `Answer`, the base class of all JSON answers of the server.

Owns how the server writes an answer as JSON, and how the SDK reads it from JSON. Imports only pydantic, because
sessions, the API and the SDK all use these classes.
Invariant: the SDK can read the answers of a newer or older server. The attribute `raw` has all fields of the JSON, also
unknown ones. A field that the JSON lacks gets an empty value.
"""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Generic, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

T = TypeVar("T")


class Answer(BaseModel):
    """The base class of all JSON answers.

    The JSON contains every field, with one exception: a field declared with `absent()` is left out if its value is
    None.
    """

    model_config = ConfigDict(
        frozen=True, protected_namespaces=(), defer_build=True, json_schema_serialization_defaults_required=True
    )
    _raw: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The JSON object from which the SDK made this answer. It also has the fields that the SDK does not know."""
        return self._raw

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Makes an answer from a JSON object, without validation. A value with an unexpected type is kept unchanged."""
        values = {
            name: _converted(field.annotation, data[name]) if name in data else _empty(field.annotation)
            for name, field in cls.model_fields.items()
            if name in data or field.is_required()
        }
        answer = cls.model_construct(**values)
        answer._raw = data
        return answer

    def body(self) -> dict[str, Any]:
        """Returns this answer as a dict that `json.dumps` can write."""
        return self.model_dump(mode="json")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__


def absent() -> Any:
    """Declares a field of an `Answer` that is left out of the JSON if its value is None."""
    return Field(default=None, exclude_if=_is_none)


class Page(Answer, Generic[T]):
    """One page of a list. If `has_more` is true, send the page's `last_id` as the parameter `after` to get the next
    page.
    """

    object: Literal["list"] = "list"
    data: tuple[T, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Returns the name that OpenAPI shows for a page class, such as `AdapterList` for a page of `Adapter`."""
        return f"{params[0].__name__}List"

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # pydantic iterates over the fields
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class Deleted(Answer):
    """The result of a deletion. `id` is the id of the deleted object, and `object` is its type."""

    id: str
    object: str
    deleted: Literal[True] = True


def _is_none(value: object) -> bool:
    return value is None


def _converted(hint: Any, value: Any) -> Any:
    """Converts `value` to the type `hint` if it fits. If not, returns it unchanged."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _converted(next(each for each in arguments if each is not type(None)), value)
    if origin is tuple and isinstance(value, list):
        return tuple(_converted(arguments[0], each) for each in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _converted(arguments[1], each) for key, each in value.items()}
    if isinstance(hint, type) and issubclass(hint, Answer) and isinstance(value, Mapping):
        return hint.read(value)
    return value


def _empty(hint: Any) -> Any:
    """Returns the empty value for a required field that the JSON lacks: 0, empty text, an empty container or None."""
    origin = get_origin(hint)
    if origin in (tuple, dict, list):
        return origin()
    if origin is Literal:
        return get_args(hint)[0] if len(get_args(hint)) == 1 else ""
    if isinstance(hint, type) and issubclass(hint, Answer):
        return hint.read({})
    return hint() if hint in (str, int, float, bool) else None
