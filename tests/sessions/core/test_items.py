"""Tests of items and of their form as messages."""

import pytest

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import CallId
from graftwork.sessions.core.items import (
    Item,
    function_call,
    function_call_output,
    item_from_body,
    message,
    parse_input,
    parse_output,
    prompt_messages,
)
from graftwork.sessions.text.messages import Message, ToolCall

CALL = CallId("call_1")


def test_text_is_one_user_message() -> None:
    """A turn's input may be a text."""
    (item,) = parse_input("Hi")

    assert item.body == {
        "id": item.item_id,
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }


def test_parts_are_lines() -> None:
    """A message's parts become lines of the prompt, and stay separate in the item."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]

    (item,) = parse_input([{"role": "user", "content": parts}])

    assert item.text == "a\nb"
    assert item.body["content"] == parts


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ([], "input"),
        (7, "input"),
        (["Hi"], "input[0]"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": "x", "name": "y"}], "input[0].name"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "ok"}, {"type": "function_call_output"}], "input[1].type"),
        ("\udc00", "input"),
    ],
)
def test_bad_input_is_refused_by_name(raw: object, param: str) -> None:
    """A refused input names the faulty field."""
    with pytest.raises(ValidationFailed) as caught:
        parse_input(raw)

    assert caught.value.param == param


def test_outputs_are_text_or_json() -> None:
    """A tool's output stays text; another value becomes JSON text."""
    assert parse_output("plain", "output") == "plain"
    assert parse_output({"temperature": 20, "unit": "°C"}, "output") == '{"temperature": 20, "unit": "°C"}'
    with pytest.raises(ValidationFailed):
        parse_output(float("nan"), "output")


def test_answer_is_one_message() -> None:
    """A text and the calls after it become one assistant message; outputs carry the tool's name."""
    items = [
        message("developer", "Be brief."),
        message("user", "Weather?"),
        message("assistant", "Let me look."),
        function_call(CALL, "get_weather", '{"city": "Oslo"}'),
        function_call_output(CALL, "cold"),
    ]

    assert prompt_messages(items) == (
        Message("system", "Be brief."),
        Message("user", "Weather?"),
        Message("assistant", "Let me look.", (ToolCall(CALL, "get_weather", '{"city": "Oslo"}'),)),
        Message("tool", "cold", tool_call_id=CALL, name="get_weather"),
    )


def test_stored_body_is_the_item() -> None:
    """An item is rebuilt from its body without a loss."""
    items: list[Item] = [message("assistant", "x", incomplete=True), function_call(CALL, "f", "{}")]

    assert [item_from_body(item.body) for item in items] == items
