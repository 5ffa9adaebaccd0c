"""The sampling fields that chat.completions, completions and sessions share, and their way to the engine."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from graftwork.api.schemas.bodies import FieldComplaint, OpenAiBody
from graftwork.engine.request import SamplingParams

MAX_STOP_STRINGS = 16
"""OpenAI takes 4; clients that were written for other engines send more."""
MAX_STOP_CHARACTERS = 256

_SEED_MASK = (1 << 64) - 1

StopStrings = Annotated[list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_STOP_STRINGS)]


class SamplingFields(OpenAiBody):
    """Null means absent everywhere: clients send it for what their user left out."""

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=1 << 30)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    ignore_eos: bool | None = None
    stop: StopStrings | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def one_stop_is_a_list_of_one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def empty_stops_match_everywhere(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and "" in value:
            raise ValueError("an empty stop string would end every answer at once; leave it out")
        return value

    @model_validator(mode="after")
    def minimum_within_maximum(self) -> Self:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise FieldComplaint("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        return self

    def sampling_params(self, max_tokens: int, choice: int = 0) -> SamplingParams:
        """`choice` is the answer's index: with a seed each of several answers has its own, and keeps it."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else (self.seed + choice) & _SEED_MASK,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            ignore_eos=bool(self.ignore_eos),
        )
