"""What the server answers, as frozen dataclasses, and the tolerant reading of JSON into them.

Invariant: a server that is newer or older than the SDK never breaks it. Unknown fields stay in `raw`, missing ones
take their defaults, and a value of an unexpected kind is handed through as it came.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Generic, Self, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Base of every answer; `raw` is the JSON it was read from."""

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
        known = {name: _convert(hints[name], value) for name, value in data.items() if name in hints}
        return cls(**known, raw=data)


@cache
def _hints(answer_class: type[Any]) -> dict[str, Any]:
    """The types of all fields but `raw`."""
    hints = get_type_hints(answer_class)
    return {entry.name: hints[entry.name] for entry in fields(answer_class) if entry.name != "raw"}


def _convert(hint: Any, value: Any) -> Any:
    """`value` as `hint` says, as far as it fits."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _convert(next(each for each in arguments if each is not type(None)), value)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], each) for each in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _convert(arguments[1], each) for key, each in value.items()}
    if isinstance(hint, type) and issubclass(hint, Answer) and isinstance(value, Mapping):
        return hint.read(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Answer, Generic[T]):
    """One page of a list, itself iterable; pass `after=page.last_id` for the next while `has_more`."""

    data: tuple[T, ...] = ()
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    def __iter__(self) -> Iterator[T]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails(Answer):
    """Where the prompt's tokens came from; device + host + disk = cached, cached + recomputed = prompt."""

    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokensDetails(Answer):
    """How the completion's tokens were found."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(Answer):
    """The tokens of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()

    @property
    def cached_share(self) -> float:
        """The part of the prompt that was not computed again, from 0 to 1."""
        cached = self.prompt_tokens_details.cached_tokens
        return cached / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted(Answer):
    """What a DELETE answers, as far as it answers anything."""

    id: str = ""
    object: str = ""
    deleted: bool = True
