"""Tests of reading OpenAI's chat messages and of the dictionaries for templates."""

from typing import Any

import pytest

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.messages import Message, ToolCall, messages_from_chat


def call(arguments: object = "{}") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_every_field_is_taken_over() -> None:
    """A conversation with tool calls keeps its calls, results and names."""
    messages = messages_from_chat(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')], "reasoning_content": "Hm."},
            {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        ]
    )

    assert messages == (
        Message("system", "Be brief."),
        Message("user", "Hi", name="Ada"),
        Message("assistant", None, (ToolCall("call_1", "f", '{"a": 1}'),), reasoning="Hm."),
        Message("tool", "3", tool_call_id="call_1"),
    )


def test_parts_are_joined_by_lines() -> None:
    """Text parts of either OpenAI API join to one text."""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]

    (message,) = messages_from_chat([{"role": "user", "content": parts}])

    assert message.content == "a\nb\nc"


def test_templates_read_arguments_as_values() -> None:
    """Arguments are parsed for the template; missing ones are an empty object, and broken JSON stays text."""
    calls = tuple(ToolCall("call_1", "f", text) for text in ('{"a": [1]}', "", '{"a": '))

    form = Message("assistant", tool_calls=calls).template_dict()

    assert [call["function"]["arguments"] for call in form["tool_calls"]] == [{"a": [1]}, {}, '{"a": ']


def test_what_is_absent_stays_absent() -> None:
    """Templates print a None as text, so no field is None."""
    assert Message("assistant", "Hi").template_dict() == {"role": "assistant", "content": "Hi"}


def test_reasoning_goes_by_both_its_names() -> None:
    """Templates read reasoning under either of two names."""
    form = Message("assistant", "Hi", reasoning="Hm.").template_dict()

    assert (form["reasoning_content"], form["thinking"]) == ("Hm.", "Hm.")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "function", "content": "Hi"}, "messages[0].role"),
        ({"role": 1, "content": "Hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call({})]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_bad_message_is_refused_by_field(message: dict[str, Any], param: str) -> None:
    """A message that cannot be read is an InvalidRequest that names the field."""
    with pytest.raises(InvalidRequest) as raised:
        messages_from_chat([message])

    assert raised.value.param == param
