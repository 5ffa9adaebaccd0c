"""Tests of the text of a custom tool inside the arguments of its call."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.tools.tool_choice import CustomInputReader, arguments_of, arguments_schema, input_of
from tests.sessions.tools.cpu_limit import printed_within_limit


@given(text=st.text(), is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_the_text_arrives_whole_however_it_is_cut(text: str, is_ascii: bool, cuts: list[int]) -> None:
    """The pieces of the text are the text that the JSON has, whatever its escapes and wherever it is cut."""
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    places = sorted({0, *(cut for cut in cuts if cut < len(arguments)), len(arguments)})
    reader = CustomInputReader()

    pieces = [reader.push(arguments[start:end]) for start, end in pairwise(places)]

    assert "".join(pieces) == text
    assert input_of(arguments) == input_of(arguments_of(text)) == text


def test_a_character_is_given_when_it_is_certain() -> None:
    """An escape is held back until it is complete, and so is the first half of a pair."""
    reader = CustomInputReader()

    pieces = [reader.push(piece) for piece in ('{"input": "a', "\\", "n\\u00", "e9\\ud83d", "\\ude", '00!"', "}")]

    assert pieces == ["a", "", "\n", "é", "", "\U0001f600!", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"in', ""),
        ('{"input": "ab\\', "ab"),
        ('{"input": "a\\ud800b"}', "a\ufffdb"),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
    ],
)
def test_other_arguments(arguments: str, text: str) -> None:
    """A text that is cut off is given as far as it goes; arguments without a text are given as they are."""
    assert input_of(arguments) == text


@pytest.mark.parametrize("definition", ["^[a-z]+$", "[a-z]+", "^[a-z]+"])
def test_a_pattern_matches_the_whole_text(definition: str) -> None:
    """Anchors at the ends of a regular expression change nothing."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}

    schema = arguments_schema({"name": "f", "format": grammar}, "tools[0]")

    assert schema["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


def test_a_dollar_sign_is_no_anchor() -> None:
    """An escaped dollar sign at the end stays."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a\\$"}}

    schema = arguments_schema({"name": "f", "format": grammar}, "tools[0]")

    assert schema["properties"]["input"]["pattern"] == "^(?:a\\$)$"


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", "a)|(b"),
        ("regex", "a)(?:b"),
        ("regex", "^a)|(?:b$"),
        ("regex", "(?:a"),
        ("regex", "a\\"),
        ("lark", "start: /a)|(b/"),
        ("lark", "start: /(?:a/ /b)/"),
        ("lark", "start: /[a/ /b]/"),
    ],
)
def test_a_pattern_must_be_whole_in_itself(syntax: str, definition: str) -> None:
    """A pattern that closes a group of its surroundings, or leaves one open, is refused with the place of its tool."""
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}

    with pytest.raises(InvalidRequest) as refused:
        arguments_schema({"name": "f", "format": grammar}, "tools[3].custom")

    assert refused.value.param == "tools[3].custom.format.definition"
    assert refused.value.code == "unsupported_grammar"


def test_backslashes_take_linear_work() -> None:
    """A definition of 60,000 backslashes is read in milliseconds; the square of their number would exceed the limit."""
    program = """
from graftwork.sessions.tools.tool_choice import arguments_schema
grammar = {"syntax": "regex", "definition": chr(92) * 60_000 + "xx$"}
print(len(arguments_schema({"name": "f", "format": {"type": "grammar", "grammar": grammar}}, "tools[0]")))
"""
    assert int(printed_within_limit(program)) > 0


def test_a_long_definition_is_refused() -> None:
    """A grammar has a limit of characters, and the error names its field."""
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x" * 70_000}}

    with pytest.raises(InvalidRequest) as refused:
        arguments_schema({"name": "f", "format": grammar}, "tools[0]")

    assert refused.value.param == "tools[0].format.definition"
