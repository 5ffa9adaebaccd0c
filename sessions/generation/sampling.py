"""`logit_bias` as OpenAI's clients write it: an object from token ids, spelled as text, to numbers.

Knows no vocabulary: whether an id has a token is for whoever knows the model to say.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_BIASED_TOKENS = 1024
_MAX_BIAS = 100
_MAX_DIGITS = 10


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """By ascending token id. Raises ValueError that says what is wrong."""
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object of at most {MAX_BIASED_TOKENS} token ids, with a number for each")
    biases = {_token_id(key): _bias(key, bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("names a token twice")
    return tuple(sorted(biases.items()))


def _token_id(key: Any) -> int:
    if not isinstance(key, str) or not key.isascii() or not key.isdecimal() or len(key) > _MAX_DIGITS:
        raise ValueError(f"{key!r} is no token id; write the id's digits")
    return int(key)


def _bias(key: Any, bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not math.isfinite(bias) or abs(bias) > _MAX_BIAS:
        raise ValueError(f"the bias of token {key} must be a number from -{_MAX_BIAS} to {_MAX_BIAS}")
    return float(bias)
