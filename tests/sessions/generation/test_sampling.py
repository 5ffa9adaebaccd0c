"""Tests of the sampling fields, and of the token budget of an answer."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from graftwork.engine.core.sampling import MOST_ROLLING_TOKENS, RANGES, RollingWindow, SamplingParams
from graftwork.platform.errors import ContextLengthExceeded
from graftwork.sessions.generation.sampling import (
    ASSUMED_TOKENS,
    SamplingFields,
    SessionSampling,
    TokenBudget,
    token_budget,
)

NOT_OF_CLIENTS = {"choice", "logprobs", "prompt_logprobs"}
"""Fields that clients do not send under these names."""


def test_every_field_of_the_engine_is_offered() -> None:
    """No sampling field of the engine is missing in the API's model."""
    assert {field.name for field in fields(SamplingParams)} - NOT_OF_CLIENTS <= set(SamplingFields.model_fields)


@pytest.mark.parametrize(
    "name", sorted(set(RANGES) - NOT_OF_CLIENTS - {"max_tokens", "top_k", "seed", "stop_token_ids"})
)
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


def test_a_limit_beyond_the_context_is_cut_to_what_is_left() -> None:
    """An answer never gets more tokens than the prompt leaves free, and the quota reserves no more either."""
    assert token_budget(990, 5000, 1000, "messages") == TokenBudget(10, 10)
    assert token_budget(999, 2, 1000, "prompt") == TokenBudget(1, 1)


def test_a_window_that_fits_into_the_context_lifts_its_limit() -> None:
    """Prompt and answer may be longer than the context, up to the longest text; an answer without a limit has one context at
    most. A window that is wider than the context lifts nothing."""
    window = RollingWindow(4, 996)

    assert token_budget(1500, 5000, 1000, "messages", window) == TokenBudget(5000, 5000)
    assert token_budget(1500, None, 1000, "messages", window) == TokenBudget(1000, ASSUMED_TOKENS)
    assert token_budget(MOST_ROLLING_TOKENS - 7, 9, 1000, "messages", window) == TokenBudget(7, 7)
    assert token_budget(990, 5000, 1000, "messages", RollingWindow(5, 996)) == TokenBudget(10, 10)
    for prompt, wide in ((MOST_ROLLING_TOKENS, window), (1000, RollingWindow(5, 996))):
        with pytest.raises(ContextLengthExceeded):
            token_budget(prompt, 1, 1000, "messages", wide)


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "message"),
    [
        (
            1001,
            7,
            (
                "This model's maximum context length is 1000 tokens. However, your messages resulted in 1001 tokens. "
                "Please reduce the length of the messages (context_length_exceeded)."
            ),
        ),
        (
            1000,
            7,
            (
                "This model's maximum context length is 1000 tokens. However, you requested 1007 tokens (1000 in the "
                "messages, 7 in the completion). Please reduce the length of the messages or completion "
                "(context_length_exceeded)."
            ),
        ),
        (
            1000,
            None,
            (
                "This model's maximum context length is 1000 tokens. However, you requested 1001 tokens (1000 in the "
                "messages, 1 in the completion). Please reduce the length of the messages or completion "
                "(context_length_exceeded)."
            ),
        ),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_in_openais_words(
    prompt_tokens: int, asked: int | None, message: str
) -> None:
    """The refusal is OpenAI's sentence, because clients recognise the error by it."""
    with pytest.raises(ContextLengthExceeded) as caught:
        token_budget(prompt_tokens, asked, 1000, "messages")

    assert (caught.value.message, caught.value.param) == (message, "messages")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
