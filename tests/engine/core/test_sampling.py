"""Tests of the ranges of the sampling fields."""

from typing import Any

import pytest

from graftwork.engine.core.sampling import DESCRIPTIONS, RANGES, SamplingParams
from graftwork.platform.errors import InvalidRequest

OUTSIDE: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1,),
    "temperature": (-0.1, 2.1, float("nan")),
    "top_k": (0,),
    "top_p": (0.0, 1.1),
    "min_p": (-0.1, 1.1),
    "seed": (-1, 1 << 64),
    "min_tokens": (-1,),
    "stop_token_ids": ((5, -1),),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1, float("inf")),
    "repetition_penalty": (0.0, 101),
    "logprobs": (-1, 21),
    "prompt_logprobs": (-1, 21),
    "attention_window": (0, -3),
    "choice": (-1,),
}
INSIDE: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 1),
    "temperature": (0, 2),
    "top_k": (1, None),
    "top_p": (1, 0.001),
    "min_p": (0, 1),
    "seed": (0, (1 << 64) - 1, None),
    "stop_token_ids": ((), (0, 7)),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "attention_window": (1, None),
    "logprobs": (0, 20, None),
    "prompt_logprobs": (0, 20, None),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in OUTSIDE for value in OUTSIDE[field]])
def test_a_value_outside_its_range_is_refused(field: str, value: Any) -> None:
    """The error names the field and its range."""
    params = SamplingParams(**{"max_tokens": 1, field: value})

    with pytest.raises(InvalidRequest, match=str(RANGES[field])) as refused:
        params.check()

    assert refused.value.param == field


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in INSIDE for value in INSIDE[field]])
def test_the_bounds_themselves_are_inside(field: str, value: Any) -> None:
    """A range includes the bounds it is written with, and None where it means "not set"."""
    SamplingParams(**{"max_tokens": 1, field: value}).check()


def test_an_infinite_bias_is_refused() -> None:
    """A bias has no range, but must be finite: infinities would make NaN of the logits."""
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(1, logit_bias=((3, float("inf")),)).check()

    assert refused.value.param == "logit_bias"


def test_every_field_has_a_description() -> None:
    """Each description is one sentence."""
    assert all(text.endswith(".") and text[0].isupper() for text in DESCRIPTIONS.values())
