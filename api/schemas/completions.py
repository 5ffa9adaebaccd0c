"""Defines the body of `POST /v1/completions`."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from graftwork.api.schemas.base import (
    COMPLETION_UNSUPPORTED,
    FieldError,
    MixtureParts,
    ResponseFormatBody,
    SamplingBody,
    refuse_unsupported,
)
from graftwork.api.schemas.chat import MAX_CHOICES, StreamOptions, TierName
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS

DEFAULT_COMPLETION_TOKENS = 16
"""The default length of a completion in tokens. OpenAI's API and other engines use the same number."""

Prompt = str | list[int]

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "title": "Prompt",
    "anyOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ],
}


class CompletionRequest(SamplingBody, ResponseFormatBody):
    """One or more prompts, and the settings of their completions."""

    model: str
    adapters: MixtureParts | None = None
    """An extension of OpenAI's API: a mixture of adapters. The server adds their weight changes to the base model."""
    prompt: Annotated[
        list[Prompt], Field(min_length=1, max_length=MAX_CHOICES), WithJsonSchema(PROMPT_SCHEMA, mode="validation")
    ]
    """One prompt or a list of prompts. Each prompt is a text or a list of token ids."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """How many likely tokens to report beside each token, with log-probabilities."""
    echo: bool | None = None
    """If true, the answer begins with the prompt."""
    return_token_ids: bool | None = None
    """If true, the answer has the token ids of the prompt and of the completion."""
    add_special_tokens: bool | None = None
    service_tier: TierName | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, COMPLETION_UNSUPPORTED)

    @field_validator("prompt", mode="before")
    @classmethod
    def wrap_single_prompt(cls, value: object) -> object:
        """Puts a single prompt into a list, so that `prompt` is always a list of prompts.

        A single prompt is a text or a list of token ids.
        """
        is_ids = isinstance(value, list) and value and all(type(entry) is int for entry in value)
        return [value] if isinstance(value, str) or is_ids else value

    @field_validator("logprobs", mode="before")
    @classmethod
    def treat_false_as_none(cls, value: object) -> object:
        """Converts `logprobs: false` to None. Some clients send false, as they do for chat completions."""
        return None if value is False else value

    @model_validator(mode="after")
    def check_num_choices(self) -> "CompletionRequest":
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} choices a request: send fewer prompts or a smaller n")
        return self

    @model_validator(mode="after")
    def refuse_echo_with_logprobs(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise FieldError("logprobs", "with echo the prompt's tokens would need scores too; leave one of them out")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS
