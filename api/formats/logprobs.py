"""Token scores in OpenAI's two shapes: a list of objects for chat, parallel lists for text completions."""

from collections.abc import Sequence
from typing import Any

from graftwork.sessions.generation.generator import GenerationEvent, GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs, TokenLogprob

_IMPOSSIBLE = -9999.0
"""OpenAI's value for a probability of zero, because JSON has no infinity."""


def new_logprobs(event: GenerationEvent) -> Sequence[OutputTokenLogprobs]:
    """The scores that no earlier event told."""
    if isinstance(event, GenerationFinished):
        return event.unsent_logprobs
    return event.logprobs if isinstance(event, TextDelta) else ()


def chat_logprobs(scores: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """The joined `bytes` are the answer's text. One `token` may be part of a character."""
    content = [_entry(score.token) | {"top_logprobs": [_entry(one) for one in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[OutputTokenLogprobs]) -> dict[str, Any]:
    """The chosen token is always among the top tokens, so there may be one more than requested."""
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
    """The token's text, or its bytes if they are no valid text, so that keys differ."""
    try:
        return token.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelling)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _IMPOSSIBLE)
