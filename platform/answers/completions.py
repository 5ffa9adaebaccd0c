"""The answers of `/v1/completions`, whole and in chunks."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.usage import Usage


class CompletionLogprobs(Answer):
    """Log-probabilities as parallel lists, one entry a token."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]
    """Where each token begins in the text, in characters."""


class TextChoice(Answer):
    """One completion, or what a chunk adds to it. The token ids are there with `return_token_ids` only."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: tuple[int, ...] | None = absent()
    token_ids: tuple[int, ...] | None = absent()


class TextCompletion(Answer):
    """All completions of one request."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: tuple[TextChoice, ...]
    usage: Usage


class TextCompletionChunk(Answer):
    """A chunk of a streamed completion. With `include_usage`, the last chunk has `usage` and no choice."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    usage: Usage | None = absent()
    choices: tuple[TextChoice, ...]
