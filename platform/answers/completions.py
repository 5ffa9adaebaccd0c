"""Defines the JSON answers of `/v1/completions`: complete answers, and the chunks of a streamed answer."""

from typing import Literal

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.answers.usage import Usage


class CompletionLogprobs(Answer):
    """The log-probabilities of a completion. Each list has one entry for each token of the completion.

    With `echo`, entries for the tokens of the prompt come first. The first token of a prompt has null.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]
    """The position of each token in the completion's text, in characters."""


class PromptLogprob(Answer):
    """The log-probability of one token at a position of the prompt. `rank` 1 is the likeliest token there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]
"""One object for each token of the prompt, by token id: the prompt's own token, then the likeliest tokens.

The first token of a prompt has null.
"""


class TextChoice(Answer):
    """One completion, or the part of a completion that one chunk adds.

    Token ids are present only if the request set `return_token_ids`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: tuple[int, ...] | None = absent()
    token_ids: tuple[int, ...] | None = absent()
    prompt_logprobs: PromptLogprobs | None = absent()
    """Present only if the request set `prompt_logprobs`."""


class TextCompletion(Answer):
    """All completions for one request to `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: tuple[TextChoice, ...]
    usage: Usage


class TextCompletionChunk(Answer):
    """One chunk of a streamed completion.

    If the request set `include_usage`, there is one more chunk at the end. It has `usage`, and no choices.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    usage: Usage | None = absent()
    choices: tuple[TextChoice, ...]
