"""Defines the answers of `/v1/models`, `/v1/tokenize`, `/v1/detokenize` and `/v1/messages/count_tokens`."""

from typing import Literal

from graftwork.platform.answers.base import Answer


class Model(Answer):
    """A name that a request can send as `model`. `parent` is the base model if the name is an adapter's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    """The longest context, in tokens."""
    root: str
    """The adapter version, adapter or base model that serves this name."""
    parent: str | None


class TokenizedPrompt(Answer):
    """The token ids of a prompt. `max_model_len` is the longest context of the model, in tokens."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class DetokenizedPrompt(Answer):
    """The text for the token ids of a request."""

    prompt: str


class TokenCount(Answer):
    """The number of tokens in a conversation's prompt."""

    input_tokens: int
