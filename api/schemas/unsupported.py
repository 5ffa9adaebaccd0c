"""Lists the known fields that this server does not support, and refuses them.

A neutral value, such as null, asks for nothing and is accepted. The server ignores fields that do not change the
answer, such as `user`, `metadata`, `store` and `prompt_cache_key`. So they are not in the lists.
"""

from collections.abc import Callable, Mapping
from typing import Any

from graftwork.api.schemas.base import FieldError

IsNeutral = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    """Return whether the value is null, false, zero or empty."""
    return not value


def _one(value: Any) -> bool:
    return value in (None, 1)


def _auto_or_none(value: Any) -> bool:
    return value in (None, "auto", "none")


_CONSTRAINED_DECODING: dict[str, IsNeutral] = dict.fromkeys(
    (
        "structured_outputs",
        "json_schema",
        "ebnf",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
    ),
    _empty,
)

_LOGITS: dict[str, IsNeutral] = {
    "prompt_logprobs": lambda value: value is None,  # 0 asks for the scores of the prompt's own tokens
    "length_penalty": _one,
    "bad_words": _empty,
    "allowed_token_ids": _empty,
    "use_beam_search": _empty,
    "best_of": _one,
    "truncate_prompt_tokens": _empty,
}

COMPLETION_UNSUPPORTED: Mapping[str, IsNeutral] = {
    **_CONSTRAINED_DECODING,
    **_LOGITS,
    "suffix": _empty,
    "top_logprobs": _empty,
    "prompt_embeds": _empty,
}

CHAT_UNSUPPORTED: Mapping[str, IsNeutral] = {
    **_CONSTRAINED_DECODING,
    **_LOGITS,
    "functions": _empty,
    "function_call": _auto_or_none,
    "audio": _empty,
    "modalities": lambda value: value in (None, ["text"]),
    "web_search_options": lambda value: value is None,
    "echo": _empty,
    "continue_final_message": _empty,
    "add_generation_prompt": lambda value: value in (None, True),
    "chat_template": _empty,
    "chat_template_kwargs": _empty,
    "documents": _empty,
}


def refuse_unsupported(body: Any, unserved: Mapping[str, IsNeutral]) -> Any:
    """Return the body unchanged. Raises FieldError for the first unsupported field whose value is not neutral."""
    if isinstance(body, Mapping):
        for field, is_neutral in unserved.items():
            if field in body and not is_neutral(body[field]):
                raise FieldError(field, "this value is known, but not served here; leave the field out")
    return body
