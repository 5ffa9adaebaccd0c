"""Defines the JSON answers of `/v1/models`, `/v1/tokenize`, `/v1/detokenize` and `/v1/messages/count_tokens`."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent


class Model(Answer):
    """A name that a request can send as `model`. `parent` is the base model if the name belongs to an adapter, else
    null.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    """The most tokens that the prompt and the answer may have together."""
    root: str
    """The adapter version, adapter or base model that serves this name."""
    parent: str | None


class ModelInfo(Answer):
    """A name that a request can send as `model`, in the form of Anthropic's API."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """The time as RFC 3339. It is 1970 for the base model, whose time is unknown."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    """The most tokens that the prompt and the answer may have together."""
    max_tokens: int
    """The most tokens that an answer may have. It also has at most the tokens that the prompt leaves free."""


class ModelInfoPage(Answer):
    """One page of the models in the form of Anthropic's API."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizedPrompt(Answer):
    """The token ids of a prompt.

    `count` is the number of tokens. `max_model_len` is the most tokens that prompt and answer may have together.
    """

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: tuple[str, ...] | None = absent()
    """The spelling of each token in the vocabulary. Present only if the request set `return_token_strs`."""


class DetokenizedPrompt(Answer):
    """The text of the token ids that the request sent."""

    prompt: str


class TokenCount(Answer):
    """The number of tokens in the prompt that the server would make from a `/v1/messages` request."""

    input_tokens: int
