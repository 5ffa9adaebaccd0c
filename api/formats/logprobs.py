"""Builds log-probabilities in OpenAI's two forms: a list of objects for chat, parallel lists for text completions.

Also builds those of a prompt's own tokens: in OpenAI's form for an echoed prompt, and in vLLM's form.
"""

from collections.abc import Sequence
from typing import Any

from graftwork.sessions.generation.generator import GenerationEvent, GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import (
    OutputTokenLogprobs,
    PromptTokenLogprobs,
    TokenLogprob,
    finite_logprob,
    token_scores,
)


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
    return {"content": [token_scores(score) for score in scores], "refusal": None}


def completion_logprobs(scores: Sequence[OutputTokenLogprobs], start: int = 0) -> dict[str, Any]:
    """Converts the log-probabilities of output tokens to the form of text completions.

    `start` is the number of characters in the choice's text before the completion.

    The top tokens always include the chosen token. So a position can have one top token more than the client asked for.
    """
    return {
        "tokens": [_key(score.token) for score in scores],
        "token_logprobs": [finite_logprob(score.token) for score in scores],
        "top_logprobs": [{_key(one): finite_logprob(one) for one in (*score.top, score.token)} for score in scores],
        "text_offset": [start + score.offset for score in scores],
    }


def echo_logprobs(prompt: Sequence[PromptTokenLogprobs], echo: str, num_top: int) -> dict[str, list[Any]]:
    """Converts the log-probabilities of a prompt's tokens to the form of text completions, for the echoed text `echo`.

    The first token has null. Offsets count characters of `echo`, which leaves out control tokens that the tokenizer
    puts before the text.
    """
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    added = _added_before(prompt, echo)
    for one in prompt:
        token = None if one.logprob is None else TokenLogprob(one.token_id, one.logprob, one.spelling)
        top = None if token is None else {_key(each): finite_logprob(each) for each in (*one.top[:num_top], token)}
        lists["tokens"].append(_key(one))
        lists["token_logprobs"].append(None if token is None else finite_logprob(token))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(min(max(one.offset - added, 0), len(echo)))
    return lists


def _added_before(prompt: Sequence[PromptTokenLogprobs], echo: str) -> int:
    """Returns how many characters of the prompt's text are tokens that the tokenizer put before the text `echo`."""
    text = b"".join(one.spelling for one in prompt).decode(errors="replace")
    return len(text) - len(echo) if text.endswith(echo) else 0


def vllm_prompt_logprobs(prompt: Sequence[PromptTokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """Converts the log-probabilities of a prompt's tokens to vLLM's form: an object by token id for each token.

    An object has the prompt's own token first, then the likeliest tokens. The first token has null.
    """
    return [None if one.logprob is None else _by_token_id(one, one.logprob, num_top) for one in prompt]


def _by_token_id(one: PromptTokenLogprobs, logprob: float, num_top: int) -> dict[str, Any]:
    own = TokenLogprob(one.token_id, logprob, one.spelling)
    ranked = [(one.rank, own), *enumerate(one.top[:num_top], start=1)]
    return {
        str(token.token_id): {
            "logprob": finite_logprob(token),
            "rank": rank,
            "decoded_token": token.spelling.decode(errors="replace"),
        }
        for rank, token in ranked
    }


def _key(token: TokenLogprob | PromptTokenLogprobs) -> str:
    """Returns the token's text.

    If its bytes are not valid UTF-8, returns the bytes in hex, so that each key is unique.
    """
    try:
        return token.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelling)
