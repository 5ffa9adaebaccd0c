"""Tests of tool call formats: how a template shows its format, and the parser of Python calls."""

import json

import pytest

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.settings.settings import Settings
from graftwork.sessions.tools.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    tool_call_format,
)
from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, PlainText
from graftwork.sessions.tools.python_parser import PythonCallParser


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("return a json object within <tool_call></tool_call>", HERMES),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', LLAMA3_JSON),
        ('{{- "[TOOL_CALLS][" }}', MISTRAL),
        ("in the format of [func_name1(params_name1=params_value1)]", PYTHONIC),
    ],
)
def test_a_template_shows_its_form(source: str | None, form: ToolCallFormat) -> None:
    """The format is recognised by texts of the template; a chosen format has priority."""
    assert tool_call_format(source) == form
    assert tool_call_format(source, "qwen") == HERMES


def test_a_template_s_spelling_is_the_one_that_is_enforced() -> None:
    """The template's own spelling of Mistral's opening comes first."""
    assert tool_call_format('{{- "[TOOL_CALLS] [" }}').opens == ("[TOOL_CALLS] [", "[TOOL_CALLS][")
    assert tool_call_format('{{- "[TOOL_CALLS][" }}').opens == ("[TOOL_CALLS][", "[TOOL_CALLS] [")


def test_the_setting_takes_the_names_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting accepts exactly the names of the table."""
    for name in ("auto", *TOOL_CALL_FORMATS):
        assert Settings.from_environment({"tool_call_form": name}).tool_call_form == name
    with pytest.raises(ValidationFailed):
        tool_call_format(None, "cobol")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_python_calls_are_read(size: int) -> None:
    """Python literals become JSON, however the text is cut."""
    text = '[get_weather(city="Par\\"is", days=3), f(a=[1, None], b={"c": True})]'
    parser = PythonCallParser()

    events = [event for start in range(0, len(text), size) for event in parser.push(text[start : start + size])]
    events += parser.flush()

    calls = [event for event in events if isinstance(event, CallFinished)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("get_weather", {"city": 'Par"is', "days": 3}),
        ("f", {"a": [1, None], "b": {"c": True}}),
    ]
    assert events[:2] == [CallStarted(0, "get_weather"), CallArguments(0, calls[0].arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "[1, 2]",
        "[f(",
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=1, a=2)]",
        "[f(**{})]",
        "[f(a={1})]",
        "[f(a='\\d']",
        "[]",
        "",
    ],
)
def test_what_is_no_list_of_calls_is_text(text: str) -> None:
    """A text that is not a list of calls is returned unchanged, and never run."""
    parser = PythonCallParser()

    events = parser.push(text) + parser.flush()

    assert events == ([PlainText(text)] if text else [])
