"""The answers of `/v1/models`, `/v1/tokenize` and `/v1/detokenize`."""

from typing import Literal

from graftwork.platform.answers.base import Answer


class Model(Answer):
    """A name that requests may give as `model`. `parent` is the base model of an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    """The context in tokens."""
    root: str
    """The adapter version or the model that the name stands for."""
    parent: str | None


class TokenizedPrompt(Answer):
    """A prompt's token ids. `max_model_len` is the model's context in tokens."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class DetokenizedPrompt(Answer):
    """The text of token ids."""

    prompt: str


class TokenCount(Answer):
    """How many tokens a conversation's prompt has."""

    input_tokens: int
