"""Defines the body of `POST /v1/embeddings`."""

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, field_validator

from graftwork.api.schemas.base import EndUserBody, MixtureParts, TierName
from graftwork.api.schemas.completions import Prompt, list_of_prompts, prompts_schema
from graftwork.engine.core.pooling import Pooling

MAX_INPUTS = 2048
"""The most inputs of one request. OpenAI's API takes the same number."""

_INPUT_SCHEMA = prompts_schema("Input", MAX_INPUTS)


class EmbeddingsRequest(EndUserBody):
    """The texts to embed, and how."""

    model: str
    adapters: MixtureParts | None = None
    """An extension of OpenAI's API: a mixture of adapters. The server adds their weight changes to the base model."""
    input: Annotated[
        list[Prompt], Field(min_length=1, max_length=MAX_INPUTS), WithJsonSchema(_INPUT_SCHEMA, mode="validation")
    ]
    """One text or a list of texts. Each is a text or a list of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """How to write the numbers: as JSON numbers (the default), or as base64 of little-endian float32 numbers."""
    dimensions: Annotated[int | None, Field(ge=1)] = None
    """Keep only so many of the first numbers. Use it with models that were trained for that."""
    pooling: Literal["last", "mean"] | None = None
    """An extension of OpenAI's API: which hidden states become the embedding. `last` (the default) takes that of the last
    token, `mean` the mean over all tokens.
    """
    normalize: bool | None = None
    """An extension of OpenAI's API: whether the embedding gets the length 1. It does by default."""
    add_special_tokens: bool | None = None
    """Whether a text gets the tokenizer's special tokens, such as one at its beginning. It does by default."""
    service_tier: TierName | None = None

    @field_validator("input", mode="before")
    @classmethod
    def wrap_single_input(cls, value: object) -> object:
        """Puts a single input into a list, so that `input` is always a list of inputs."""
        return list_of_prompts(value)

    @property
    def pooled_by(self) -> Pooling:
        return Pooling(self.pooling or Pooling.LAST)
