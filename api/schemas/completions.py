"""Defines the body of `POST /v1/completions`."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from graftwork.api.schemas.base import (
    COMPLETION_UNSUPPORTED,
    EndUserBody,
    MixtureParts,
    PromptLogprobs,
    ResponseFormatBody,
    SamplingBody,
    TierName,
    check_prompt_logprobs,
    refuse_unsupported,
)
from graftwork.api.schemas.chat import MAX_CHOICES, StreamOptions
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.sessions.generation.sampling import described_number

DEFAULT_COMPLETION_TOKENS = 16
"""The default length of a completion in tokens. OpenAI's API and other engines use the same number."""

Prompt = str | list[int]

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def prompts_schema(title: str, most: int) -> dict[str, Any]:
    """Returns the JSON Schema of a field with one prompt or up to `most`, each a text or a list of token ids."""
    lists = [{"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (_TEXT, _TOKEN_IDS)]
    return {"title": title, "anyOf": [_TEXT, _TOKEN_IDS, *lists]}


def list_of_prompts(value: object) -> object:
    """Puts a single prompt, a text or a list of token ids, into a list. Returns any other value as it is."""
    is_ids = isinstance(value, list) and value and all(type(entry) is int for entry in value)
    return [value] if isinstance(value, str) or is_ids else value


PROMPT_SCHEMA = prompts_schema("Prompt", MAX_CHOICES)


class CompletionRequest(SamplingBody, ResponseFormatBody, EndUserBody):
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
    max_tokens: Annotated[int | None, described_number("max_tokens")] = None
    """The most tokens to generate. 0 only computes the prompt, for example to get its log-probabilities."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """How many likely tokens to report beside each token, with log-probabilities."""
    echo: bool | None = None
    """If true, the answer begins with the prompt. With `logprobs`, the prompt's tokens have log-probabilities too."""
    prompt_logprobs: PromptLogprobs = None
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
        return list_of_prompts(value)

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
    def refuse_streamed_prompt_logprobs(self) -> "CompletionRequest":
        check_prompt_logprobs(self.prompt_logprobs, is_stream=bool(self.stream))
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        asked = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return max(asked, default=None)

    @property
    def token_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
