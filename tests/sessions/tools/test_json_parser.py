"""Tests of finding JSON calls in a text that arrives in pieces."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.sessions.tools.formats import ToolCallFormat
from graftwork.sessions.tools.json_parser import JsonCallParser
from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText
from tests.hypothesis_profiles import examples
from tests.sessions.tokenizer_and_templates import arguments, names

SHARDS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": ', '"f"', ', "arguments": ', "{", "}", "[", "]", " "),
    *(
        "\n",
        '"',
        "\\",
        "é",
        "x",
        ":",
        ",",
        '{"a": 1}',
        "true",
        "1",
        '{"name": "f", "arguments": {"a": "}"}}',
        '"id": 1, ',
    ),
]


def parse(text: str, cuts: random.Random | None = None) -> list[ParserEvent]:
    """All events of a text, read at once or in random pieces; neighbours of a kind are joined."""
    parser = JsonCallParser()
    events: list[ParserEvent] = []
    while text:
        size = cuts.randint(1, 4) if cuts else len(text)
        events += parser.push(text[:size])
        text = text[size:]
    return joined([*events, *parser.flush()])


def joined(events: list[ParserEvent]) -> list[ParserEvent]:
    result: list[ParserEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, PlainText) and isinstance(last, PlainText):
            result[-1] = PlainText(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(event.index, last.delta + event.delta)
        else:
            result.append(event)
    return result


def call(index: int, name: str, given: str, *, complete: bool = True) -> list[ParserEvent]:
    """The events of one call."""
    return [CallStarted(index, name), CallArguments(index, given), CallFinished(index, name, given, complete)]


@given(shards=st.lists(st.sampled_from(SHARDS), max_size=20), seed=st.integers(0, 999))
@settings(max_examples=examples(200))
def test_any_pieces_give_the_same_events(shards: list[str], seed: int) -> None:
    """The events do not depend on how the text is cut, for whole and for broken calls."""
    text = "".join(shards)

    assert parse(text, random.Random(seed)) == parse(text)


@given(calls=st.lists(st.tuples(names, arguments), max_size=3), seed=st.integers(0, 999), ascii=st.booleans())
@settings(max_examples=examples(80))
def test_calls_are_found_as_written(calls: list[tuple[str, dict[str, Any]]], seed: int, ascii: bool) -> None:
    """Every call has its name, and its arguments exactly as they were written."""
    written = [json.dumps(given, ensure_ascii=ascii) for _, given in calls]
    markup = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {text}}}\n</tool_call>'
        for (name, _), text in zip(calls, written, strict=True)
    ]

    events = parse("Let me see.\n" + "\n".join(markup), random.Random(seed))

    expected: list[ParserEvent] = [PlainText("Let me see.\n")]
    for index, (name, _) in enumerate(calls):
        expected += call(index, name, written[index])
    assert events == expected


@given(shards=st.lists(st.sampled_from(SHARDS), max_size=20))
@settings(max_examples=examples(200))
def test_text_without_calls_comes_out_whole(shards: list[str]) -> None:
    """Text without a call is returned without a change."""
    text = "".join(shards)
    events = parse(text)

    if not any(isinstance(event, CallStarted) for event in events):
        assert events == ([PlainText(text)] if text else [])


@given(shards=st.lists(st.sampled_from(SHARDS), max_size=20), seed=st.integers(0, 99))
@settings(max_examples=examples(200))
def test_every_started_call_is_finished(shards: list[str], seed: int) -> None:
    """Calls count from 0, never overlap, and finish with all their deltas; `complete` means an object."""
    events = [event for event in parse("".join(shards), random.Random(seed)) if not isinstance(event, PlainText)]

    for index, (started, delta, finished) in enumerate(zip(*[iter(events)] * 3, strict=True)):
        assert isinstance(started, CallStarted)
        assert isinstance(delta, CallArguments)
        assert isinstance(finished, CallFinished)
        assert started.index == delta.index == finished.index == index
        assert (finished.name, finished.arguments) == (started.name, delta.delta)
        assert finished.complete == is_object(finished.arguments)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_call_is_announced_before_it_is_whole() -> None:
    """A call is announced when its arguments begin, and each piece of them is passed on at once."""
    parser = JsonCallParser()

    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [CallStarted(0, "f"), CallArguments(0, '{"a')]
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.push("}\n</tool_") == []
    assert parser.push("call>") == [CallFinished(0, "f", '{"a": 1}', complete=True)]


def test_text_is_held_back_only_for_an_opening_marker() -> None:
    """Text is passed on at once, except a possible start of a marker."""
    parser = JsonCallParser()

    assert parser.push("a \n<b> <tool") == [PlainText("a \n<b> ")]
    assert parser.push("s>") == [PlainText("<tools>")]


def test_order_of_the_members_is_free() -> None:
    """Arguments before the name wait for it; other members are ignored."""
    events = parse('<tool_call>{"id": 7, "arguments": {"a": [1]}, "name": "f", "x": null}</tool_call>')

    assert events == call(0, "f", '{"a": [1]}')


def test_markers_within_strings_are_text() -> None:
    """A marker inside a string of the arguments does not end the call."""
    given = '{"a": "</tool_call><tool_call>\\""}'

    assert parse(f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>') == call(0, "f", given)


def test_call_without_arguments_has_none() -> None:
    """A call without arguments has an empty object."""
    assert parse('<tool_call>{"name": "f"}</tool_call>') == call(0, "f", "{}")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"id": tru, "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>",
        "<tool_call",
        "a <tool_call>b</tool_call> c",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Markup of a call that was never announced is returned as text."""
    assert parse(text) == [PlainText(text)]


def test_call_behind_broken_markup_is_found() -> None:
    """An opening marker without a call does not hide the next call."""
    events = parse('<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')

    assert events == [PlainText("<tool_call>\n"), *call(0, "f", "{}")]


@pytest.mark.parametrize(
    ("given", "behind"),
    [
        ('{"a": "b', ""),
        ('{"a": ', "<b>}}</tool_call>"),
        ('{"a": [1', "}}</tool_call>"),
        ('{"a": tru}', "}</tool_call>"),
        ('{"a": "\n"}', "}</tool_call>"),
    ],
)
def test_announced_call_that_breaks_is_finished(given: str, behind: str) -> None:
    """An announced call with broken arguments is finished with them, and is marked incomplete."""
    events = parse('<tool_call>{"name": "f", "arguments": ' + given + behind)

    assert events == call(0, "f", given, complete=False)


@pytest.mark.parametrize("behind", ["", "}", "}}</tool_call>", "</tool_call>", ", x}</tool_call>"])
def test_whole_arguments_are_used_whatever_follows(behind: str) -> None:
    """A missing or an extra brace or marker after the arguments does not break them."""
    assert parse('<tool_call>{"name": "f", "arguments": {"a": 1}' + behind) == call(0, "f", '{"a": 1}')


def test_call_that_never_closed_ends_where_the_next_opens() -> None:
    """An opening marker ends a call whose closing marker is missing."""
    opened = '<tool_call>{"name": "f", "arguments": {}}'

    assert parse(opened + opened + "</tool_call>") == [*call(0, "f", "{}"), *call(1, "f", "{}")]


def test_text_behind_a_call_keeps_its_white_space() -> None:
    """White space after a call is dropped unless text follows."""
    closed = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert parse(closed + " \n") == call(0, "f", "{}")
    assert parse(closed + " \n" + "Done. ") == [*call(0, "f", "{}"), PlainText(" \nDone. ")]


def test_forms_are_data() -> None:
    """The same parser reads another family's markers and names."""
    parser = JsonCallParser(ToolCallFormat("<|call|>", "<|end|>", arguments_key="parameters"))

    events = parser.push('<|call|>{"name": "f", "parameters": {"a": 1}}<|end|>')

    assert events == call(0, "f", '{"a": 1}')


def test_deep_nesting_is_no_danger() -> None:
    """Arguments nested too deep for a JSON reader are marked incomplete."""
    given = '{"a": ' + "[" * 50000 + "]" * 50000 + "}"

    events = parse('<tool_call>{"name": "f", "arguments": ' + given + "}</tool_call>")

    assert events == call(0, "f", given, complete=False)
