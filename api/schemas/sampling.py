"""The sampling fields that chat.completions, completions and sessions share, and their way to the engine."""

from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from graftwork.api.schemas.base import FieldComplaint, OpenAiBody
from graftwork.engine.core.sampling import SamplingParams
from graftwork.sessions.generation.sampling import MAX_BIASED_TOKENS, parse_logit_bias

MAX_STOP_STRINGS = 16
"""OpenAI takes 4; clients that were written for other engines send more."""
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128

_SEED_MASK = (1 << 64) - 1

STOP_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOP_STRINGS),
    WithJsonSchema({"anyOf": [STOP_SCHEMA, {"type": "array", "items": STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}),
]
"""One text is short for a list of one."""


LogitBias = Annotated[
    tuple[tuple[int, float], ...] | None,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASED_TOKENS,
        }
    ),
]
"""From an object of token ids, as text, to numbers."""


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
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, Field(max_length=MAX_STOP_TOKENS)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    logit_bias: LogitBias = None

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

    @field_validator("logit_bias", mode="before")
    @classmethod
    def biases_by_token(cls, value: object) -> object:
        return None if value is None else parse_logit_bias(value)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each chosen one; None for no report."""
        return None

    @model_validator(mode="after")
    def minimum_within_maximum(self) -> Self:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise FieldComplaint("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        return self

    def sampling_params(self, max_tokens: int, choice: int = 0) -> SamplingParams:
        """`choice` is the answer's index among those to one prompt."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed & _SEED_MASK,
            choice=choice,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or (),
            logprobs=self.num_logprobs,
        )
