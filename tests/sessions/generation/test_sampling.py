"""Tests of the sampling fields, and of the token budget of an answer."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from graftwork.engine.core.sampling import RANGES, SamplingParams
from graftwork.platform.errors import ContextLengthExceeded
from graftwork.sessions.generation.sampling import (
    ASSUMED_TOKENS,
    SamplingFields,
    SessionSampling,
    TokenBudget,
    token_budget,
)

NOT_OF_CLIENTS = {"choice", "logprobs"}
"""Fields that clients do not send under these names."""


def test_every_field_of_the_engine_is_offered() -> None:
    """No sampling field of the engine is missing in the API's model."""
    assert {field.name for field in fields(SamplingParams)} - NOT_OF_CLIENTS <= set(SamplingFields.model_fields)


@pytest.mark.parametrize("name", sorted(set(RANGES) - NOT_OF_CLIENTS - {"top_k", "seed", "stop_token_ids"}))
def test_ranges_are_those_of_the_engine(name: str) -> None:
    """The API takes a field's bound where it is part of the range, and refuses what lies beyond it."""
    for bound, beyond in ((RANGES[name].ge, -1), (RANGES[name].le, 1)):
        if bound is not None:
            assert getattr(SamplingFields.model_validate({name: bound}), name) == bound
            with pytest.raises(ValidationError):
                SamplingFields.model_validate({name: bound + beyond})


def test_what_was_sent_is_told_in_the_form_it_came_in() -> None:
    """`sent` leaves out absent and null fields, and writes `logit_bias` as the object that was sent."""
    sent = {"temperature": 0.5, "logit_bias": {"7": -2.0, "9": 1.0}, "stop": ["END"]}

    fields_sent = SessionSampling.model_validate({**sent, "top_p": None})

    assert fields_sent.sent() == sent
    assert SessionSampling.model_validate(fields_sent.sent()).logit_bias == fields_sent.logit_bias


def test_a_budget_is_what_was_asked_or_what_is_left() -> None:
    """Without a limit the answer may fill the context, and a fixed number of tokens is reserved for it."""
    assert token_budget(10, 5, 1000, "messages") == TokenBudget(5, 5)
    assert token_budget(10, None, 1000, "messages") == TokenBudget(990, ASSUMED_TOKENS)
    assert token_budget(990, None, 1000, "messages") == TokenBudget(10, 10)


@pytest.mark.parametrize(("asked", "numbers"), [(None, "has 1000 tokens"), (991, "991 more were asked for")])
def test_a_budget_that_does_not_fit_is_refused(asked: int | None, numbers: str) -> None:
    """The refusal names the context, the prompt, and what was asked for."""
    with pytest.raises(ContextLengthExceeded, match=numbers) as caught:
        token_budget(1000 if asked is None else 10, asked, 1000, "prompt")

    assert caught.value.param == "prompt"
