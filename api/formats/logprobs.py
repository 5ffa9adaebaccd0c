"""Builds log-probabilities in OpenAI's two forms: a list of objects for chat, parallel lists for text completions."""

from collections.abc import Sequence
from typing import Any

from graftwork.sessions.generation.generator import GenerationEvent, GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs, TokenLogprob

_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability for a token that cannot occur. JSON has no number for minus infinity."""


def new_logprobs(event: GenerationEvent) -> Sequence[OutputTokenLogprobs]:
    """Returns the log-probabilities of those tokens in the event that were in no earlier event of the answer.

    The last event of an answer has the log-probabilities of all tokens. Only those that were not sent yet are returned.
    """
    if isinstance(event, GenerationFinished):
        return event.unsent_logprobs
    return event.logprobs if isinstance(event, TextDelta) else ()


def chat_logprobs(scores: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """Converts the log-probabilities of output tokens to the form of chat completions.

    The `bytes` of all tokens together are the answer's text. The bytes of one token may be only a part of a character.
    """
    content = [_entry(score.token) | {"top_logprobs": [_entry(one) for one in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """Converts the log-probabilities of output tokens to the form of text completions.

    The top tokens always include the chosen token. So a position can have one top token more than the client asked for.
    """
    return {
        "tokens": [_key(score.token) for score in scores],
        "token_logprobs": [_finite(score.token) for score in scores],
        "top_logprobs": [{_key(one): _finite(one) for one in (*score.top, score.token)} for score in scores],
        "text_offset": [score.offset for score in scores],
    }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.spelling.decode(errors="replace")
    return {"token": text, "logprob": _finite(token), "bytes": list(token.spelling)}


def _key(token: TokenLogprob) -> str:
    """Returns the token's text.

    If its bytes are not valid UTF-8, returns the bytes in hex, so that each key is unique.
    """
    try:
        return token.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelling)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _IMPOSSIBLE)
