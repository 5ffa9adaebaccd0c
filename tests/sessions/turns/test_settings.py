"""The settings of a turn."""

import pytest

from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.platform.errors import ContextLengthExceeded, ValidationFailed
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.generation.sampling import TokenBudget
from graftwork.sessions.turns.settings import (
    NO_OVERRIDES,
    TurnOverrides,
    check_vocabulary,
    read_sampling,
    rolling_window,
    turn_budget,
)


def test_defaults_are_the_engines() -> None:
    """A session without sampling fields has the engine's defaults."""
    assert read_sampling({}).sampling_params(9) == SamplingParams(max_tokens=9)


def test_every_field_reaches_the_engine() -> None:
    """Each sampling field reaches the engine; null means absent, and a top_k of -1 means no limit."""
    drawing = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -1}
    ending = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5, 6]}
    counting = {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.2}

    biased = {"logit_bias": {"9": 1, "7": -2}}

    params = read_sampling(drawing | ending | counting | biased).sampling_params(9)

    assert params == SamplingParams(
        9, 0, 3, 0.5, 0.1, 2**64 - 1, 2, (5, 6), True, 1, -0.5, 1.2, ((7, -2.0), (9, 1.0)), logprobs=None
    )
    assert read_sampling({"temperature": None, "top_k": -1}).sampling_params(9) == SamplingParams(9)


def test_the_window_of_a_session_is_that_of_its_turns_and_of_its_commands() -> None:
    """Both read the two fields alike; a window alone has four sinks."""
    for sampling in ({}, {"attention_window": 9}, {"attention_window": 9, "attention_sinks": 0}, {"seed": 1}):
        assert rolling_window(sampling) == read_sampling(sampling).sampling_params(1).rolling_window
    assert rolling_window({"attention_window": 9}) == RollingWindow(4, 9)
    assert rolling_window({"attention_window": 9, "attention_sinks": 0}) == RollingWindow(0, 9)


@pytest.mark.parametrize("sampling", [{"logit_bias": {"100": 1}}, {"stop_token_ids": [100]}])
def test_tokens_outside_the_vocabulary_are_refused(sampling: dict[str, object]) -> None:
    """A token id outside the vocabulary is refused with the field's name."""
    params = read_sampling(sampling).sampling_params(9)

    check_vocabulary(params, 101)
    with pytest.raises(ValidationFailed) as caught:
        check_vocabulary(params, 100)

    assert caught.value.param == f"sampling.{next(iter(sampling))}"


def test_one_stop_string_is_a_list_of_one() -> None:
    """`stop` is a text or a list."""
    assert read_sampling({"stop": "END"}).stop == ["END"]
    assert read_sampling({"stop": ["a", "b"]}).stop == ["a", "b"]
    assert read_sampling({}).stop is None


def test_overrides_replace_field_by_field() -> None:
    """A turn's sampling overrides single fields of the session's."""
    session = SessionSettings(tool_choice="none", sampling={"temperature": 1, "seed": 7})

    over = TurnOverrides(sampling={"temperature": 0}).over(session)

    assert (over.tool_choice, over.sampling) == ("none", {"temperature": 0, "seed": 7})
    assert NO_OVERRIDES.over(session) == session


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        (TurnOverrides(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
        (TurnOverrides(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (TurnOverrides(sampling={"max_tokens": 0}), "sampling.max_tokens"),
        (TurnOverrides(sampling={"seed": True}), "sampling.seed"),
        (TurnOverrides(sampling={"top_p": float("nan")}), "sampling.top_p"),
        (TurnOverrides(sampling={"stop": [""]}), "sampling.stop"),
        (TurnOverrides(sampling={"logit_bias": {"1": 200}}), "sampling.logit_bias"),
        (TurnOverrides(sampling={"logit_bias": [1]}), "sampling.logit_bias"),
        (TurnOverrides(sampling={"presence_penalty": 2.1}), "sampling.presence_penalty"),
        (TurnOverrides(sampling={"repetition_penalty": 0}), "sampling.repetition_penalty"),
        (TurnOverrides(sampling={"stop_token_ids": ["a"]}), "sampling.stop_token_ids"),
        (TurnOverrides(sampling={"n": 2}), "sampling.n"),
        (TurnOverrides(sampling={"logprobs": True}), "sampling.logprobs"),
    ],
)
def test_overrides_that_are_not_served(overrides: TurnOverrides, param: str) -> None:
    """A turn's settings are checked like a session's."""
    with pytest.raises(ValidationFailed) as caught:
        overrides.over(SessionSettings())

    assert caught.value.param == param


def test_strict_is_no_part_of_the_prompt() -> None:
    """`strict` is not part of the prompt, so it does not change a session's prompt."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}

    shown = NO_OVERRIDES.over(SessionSettings(tools=(tool,))).opening.tools

    assert shown == ({"type": "function", "function": {"name": "f"}},)


def test_answer_is_limited_by_the_context() -> None:
    """An answer without a limit may fill the context; a limit is cut to what is left."""
    assert turn_budget(SessionSettings(), 1000, 2000) == TokenBudget(1000, 256)
    assert turn_budget(SessionSettings(sampling={"max_tokens": 10}), 1000, 2000) == TokenBudget(10, 10)
    assert turn_budget(SessionSettings(sampling={"max_tokens": 10}), 1999, 2000) == TokenBudget(1, 1)
    with pytest.raises(ContextLengthExceeded):
        turn_budget(SessionSettings(), 2000, 2000)
