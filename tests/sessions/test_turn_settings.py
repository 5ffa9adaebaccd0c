"""What a turn goes by."""

import pytest

from graftwork.engine.request import SamplingParams
from graftwork.platform.errors import ContextLengthExceeded, ValidationFailed
from graftwork.sessions.agent_session import SessionSettings
from graftwork.sessions.turn_settings import (
    NO_OVERRIDES,
    TokenBudget,
    TurnOverrides,
    sampling_params,
    stop_strings,
    token_budget,
)


def test_defaults_are_the_engines() -> None:
    """A session that says nothing samples as the engine does by itself."""
    assert sampling_params(SessionSettings(), 9) == SamplingParams(max_tokens=9)


def test_every_field_reaches_the_engine() -> None:
    """Each sampling field has its place; a null is as good as absent, and -1 keeps all of top_k."""
    given = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -1, "min_tokens": 2, "ignore_eos": True}

    params = sampling_params(SessionSettings(sampling=given), 9)

    assert params == SamplingParams(9, 0, 3, 0.5, 0.1, 2**64 - 1, 2, (), True)
    assert sampling_params(SessionSettings(sampling={"temperature": None, "top_k": -1}), 9) == SamplingParams(9)


def test_one_stop_string_is_a_list_of_one() -> None:
    """`stop` is a text or a list."""
    assert stop_strings(SessionSettings(sampling={"stop": "END"})) == ("END",)
    assert stop_strings(SessionSettings(sampling={"stop": ["a", "b"]})) == ("a", "b")
    assert stop_strings(SessionSettings()) == ()


def test_overrides_replace_field_by_field() -> None:
    """A turn's sampling goes over the session's, and what it does not name stays."""
    session = SessionSettings(tool_choice="none", sampling={"temperature": 1, "seed": 7})

    over = TurnOverrides(sampling={"temperature": 0}).over(session)

    assert (over.tool_choice, over.sampling) == ("none", {"temperature": 0, "seed": 7})
    assert NO_OVERRIDES.over(session) == session


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        (TurnOverrides(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
        (TurnOverrides(response_format={"type": "json_schema"}), "response_format"),
        (TurnOverrides(sampling={"max_tokens": 0}), "sampling.max_tokens"),
        (TurnOverrides(sampling={"seed": True}), "sampling.seed"),
        (TurnOverrides(sampling={"top_p": float("nan")}), "sampling.top_p"),
        (TurnOverrides(sampling={"stop": [""]}), "sampling.stop"),
        (TurnOverrides(sampling={"logit_bias": {"1": 2}}), "sampling.logit_bias"),
    ],
)
def test_overrides_that_are_not_served(overrides: TurnOverrides, param: str) -> None:
    """A turn's own settings are checked as a session's are."""
    with pytest.raises(ValidationFailed) as caught:
        overrides.over(SessionSettings())

    assert caught.value.param == param


def test_strict_tools_are_refused() -> None:
    """A schema that nothing here enforces is not taken as if it were."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}

    with pytest.raises(ValidationFailed) as caught:
        NO_OVERRIDES.over(SessionSettings(tools=(tool,)))

    assert caught.value.param == "tools[0].function.strict"


def test_answer_gets_what_the_context_leaves() -> None:
    """Without a limit an answer may fill the context; with one it is cut to what is left."""
    assert token_budget(SessionSettings(), 1000, 2000) == TokenBudget(1000, 1256)
    assert token_budget(SessionSettings(sampling={"max_tokens": 10}), 1000, 2000) == TokenBudget(10, 1010)
    assert token_budget(SessionSettings(sampling={"max_tokens": 10}), 1999, 2000) == TokenBudget(1, 2000)
    with pytest.raises(ContextLengthExceeded):
        token_budget(SessionSettings(), 2000, 2000)
