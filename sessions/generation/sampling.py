"""Reads the sampling fields of every API, and converts them to the engine's parameters.

Owns the one pydantic model of these fields, for chat completions, completions, messages, responses and sessions. The
ranges and descriptions of the fields come from the engine's `SamplingParams`. This module adds only the rules for
fields whose form in the API differs from the engine's form. Never owns the size of a vocabulary or of a context: the
caller passes both sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_serializer, field_validator

from graftwork.engine.core.sampling import DESCRIPTIONS, RANGES, RollingWindow, SamplingParams
from graftwork.platform.errors import ContextLengthExceeded

MAX_STOP_STRINGS = 16
"""The most stop strings in a request. OpenAI takes 4; clients of other engines send more."""
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_BIASED_TOKENS = 1024
_MAX_BIAS = 100
_MAX_BIAS_DIGITS = 10
_SEED_MASK = (1 << 64) - 1

ASSUMED_TOKENS = 256
"""The number of tokens that are reserved for an answer without a limit.

A reservation of the whole context would use up a small quota for one short answer. Tokens above this number are charged
when the answer ends.
"""

_STOP_STRING: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOP_SCHEMA = {
    "anyOf": [
        _STOP_STRING,
        {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
        {"type": "null"},
    ]
}

StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS, json_schema_extra={"minLength": 1})]],
    Field(max_length=MAX_STOP_STRINGS),
]

LogitBias = Annotated[
    tuple[tuple[int, float], ...] | None,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": 1024,
        }
    ),
]
"""A JSON object that maps token ids, written as text, to numbers."""


def described_number(name: str, **narrower: float) -> Any:
    """Returns the pydantic `Field` for the numeric sampling parameter `name` of the engine.

    The field has the range and the description of the engine's parameter. `narrower` replaces bounds of this range for
    an API that allows less. Its keys are those of pydantic's `Field`, such as `le`.
    """
    bounds: dict[str, Any] = {**RANGES[name].bounds(), **narrower}
    return Field(description=DESCRIPTIONS[name], **bounds)


def _described(name: str) -> Any:
    return Field(description=DESCRIPTIONS[name])


class SamplingFields(BaseModel):
    """The sampling fields of a request.

    Null means absent, because clients send null for fields that a user did not set.

    A new field of `SamplingParams` needs one line here, if the API spells it as the engine does.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    max_tokens: Annotated[int | None, described_number("max_tokens", ge=1)] = None
    temperature: Annotated[float | None, described_number("temperature")] = None
    top_p: Annotated[float | None, described_number("top_p")] = None
    top_k: Annotated[
        int | None, Field(ge=-1, le=1 << 30, description="Keep only the k likeliest tokens; -1 and 0 keep all.")
    ] = None
    min_p: Annotated[float | None, described_number("min_p")] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64, description=DESCRIPTIONS["seed"])] = None
    min_tokens: Annotated[int | None, described_number("min_tokens")] = None
    ignore_eos: Annotated[bool | None, _described("ignore_eos")] = None
    stop: Annotated[
        StopStrings | None,
        Field(description="A text, or several texts, that end the answer."),
        WithJsonSchema(_STOP_SCHEMA),
    ] = None
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]] | None,
        Field(max_length=MAX_STOP_TOKENS, description=DESCRIPTIONS["stop_token_ids"]),
    ] = None
    presence_penalty: Annotated[float | None, described_number("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, described_number("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, described_number("repetition_penalty")] = None
    attention_window: Annotated[int | None, described_number("attention_window")] = None
    attention_sinks: Annotated[int | None, described_number("attention_sinks")] = None
    kv_budget: Annotated[int | None, described_number("kv_budget")] = None
    logit_bias: Annotated[
        LogitBias, Field(description="Maps token ids, written as text, to numbers that are added to their logits.")
    ] = None

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

    @field_serializer("logit_bias")
    def biases_as_sent(self, value: tuple[tuple[int, float], ...] | None) -> dict[str, float] | None:
        return None if value is None else {str(token_id): bias for token_id, bias in value}

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report at each position of the answer; None for no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report at each position of the prompt; None for no log-probabilities."""
        return None

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the answer may have; None if the request sets no limit."""
        return self.max_tokens

    def sampling_params(self, max_tokens: int, choice: int = 0) -> SamplingParams:
        """Converts the fields to the engine's parameters. `max_tokens` is the most tokens that the answer may have.

        `choice` is the index of the answer if one prompt gets several answers, from 0. Only the first answer reports
        the log-probabilities of the prompt.
        """
        given = {name: value for name in _SPELLED_ALIKE if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            seed=None if self.seed is None else self.seed & _SEED_MASK,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs if choice == 0 else None,
            choice=choice,
            **given,
        )

    @property
    def rolling_window(self) -> RollingWindow | None:
        """The tokens that a token attends to; None for all up to itself."""
        return RollingWindow.of(self.attention_window, self.attention_sinks)

    def sent(self) -> dict[str, Any]:
        """Returns the sampling fields that are not null in the request, as JSON values by field name."""
        return self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)


_SPELLED_ALIKE = {field.name for field in fields(SamplingParams)} & set(SamplingFields.model_fields) - {
    "max_tokens",
    "top_k",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "prompt_logprobs",
}
"""Fields whose value is passed to the engine unchanged."""


NEUTRAL_VALUES: Mapping[str, bool | int] = {"logprobs": False, "top_logprobs": 0, "n": 1}
"""Maps sampling fields that sessions do not support to the one value that they accept. This value has no effect."""


def _with_neutral_values(schema: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL_VALUES.items():
        schema["properties"][name] = {
            "anyOf": [{"const": neutral}, {"type": "null"}],
            "description": "Sessions do not support this field. The only value has no effect.",
        }


_BUDGET = "The most tokens of the model's reasoning. After so many, the reasoning ends and the answer follows."


class SessionSampling(SamplingFields):
    """The sampling fields of a session or of one turn. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_with_neutral_values)

    max_completion_tokens: Annotated[int | None, described_number("max_tokens", ge=1)] = None
    thinking_token_budget: Annotated[int | None, Field(ge=0, description=_BUDGET)] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The limit of tokens for one answer, and the number of tokens that the quota reserves for it."""

    max_tokens: int
    expected_tokens: int
    """How many tokens the quota reserves for the answer."""


def token_budget(
    prompt_tokens: int, asked: int | None, context_tokens: int, param: str, window: RollingWindow | None = None
) -> TokenBudget:
    """Returns the token budget of one answer.

    The answer may have `asked` tokens, but at most the tokens of the context that the prompt leaves free. If `asked` is
    None, it may have all of these. With a rolling window that fits into the context, prompt and answer may be longer than
    it, and an answer whose length nobody has named as long as it.
    Raises ContextLengthExceeded if the prompt leaves no token for the answer. The error names the request field
    `param`.
    """
    longest = context_tokens if window is None else window.longest_text(context_tokens)
    left = longest - prompt_tokens
    if left < (1 if asked is None else min(asked, 1)):
        raise ContextLengthExceeded.of_prompt(prompt_tokens, longest, param, max_tokens=asked)
    if asked is None:
        left = min(left, context_tokens)
        return TokenBudget(left, min(left, ASSUMED_TOKENS))
    fitting = min(asked, left)
    return TokenBudget(fitting, fitting)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Reads the request field `logit_bias`. Returns pairs of token id and bias, sorted by token id.

    Raises ValueError with the reason if the field has a wrong value.
    """
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object of at most {MAX_BIASED_TOKENS} token ids, with a number for each")
    biases = {_token_id(key): _bias(key, bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("names a token twice")
    return tuple(sorted(biases.items()))


def _token_id(key: Any) -> int:
    if not isinstance(key, str) or not key.isascii() or not key.isdecimal() or len(key) > _MAX_BIAS_DIGITS:
        raise ValueError(f"{key!r} is no token id; write the id's digits")
    return int(key)


def _bias(key: Any, bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not math.isfinite(bias) or abs(bias) > _MAX_BIAS:
        raise ValueError(f"the bias of token {key} must be a number from -{_MAX_BIAS} to {_MAX_BIAS}")
    return float(bias)
