"""Tests of structural tags: which answers they accept for the call formats of models."""

import json
from typing import Any

import pytest
from benchmarks.suite_cases import BYTES, Judge

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.llguidance_backend import LlguidanceBackend
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.errors import InvalidRequest

CITY = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
ANSWER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALLS = [
    {"begin": f'<call>{{"name": "{name}", "arguments": ', "schema": CITY, "end": "}</call>"}
    for name in ("get", "get_x")
]
ONE = '<call>{"name": "get", "arguments": {"city": "Rome"}}</call>'
TWO = '<call>{"name": "get_x", "arguments": {"city": "Oslo"}}</call>'
BAD = '<call>{"name": "get", "arguments": {"city": "rome"}}</call>'


def accepted(judge: Judge, tag: dict[str, Any], text: str) -> bool:
    linted = lint(GrammarSource(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    matcher = judge.compiled(linted).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete()


AUTO = {"calls": CALLS, "triggers": ["<call>"], "text": True}
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (AUTO, ["", "hi", ONE, f"hi {ONE}", f"{ONE}{TWO}", f"a{ONE}b{TWO}c", "a <cal"], [BAD, "<call>", f"{ONE}{BAD}", "x<call>y"]),
    (AUTO | {"parallel": False}, ["", "hi", ONE, f"hi {ONE}"], [f"{ONE}{TWO}", f"{ONE} bye", BAD]),
    (AUTO | {"required": True}, [ONE, f"hi {ONE} bye"], ["", "hi", BAD]),
    ({"calls": CALLS, "required": True}, [ONE, ONE + TWO], ["", "hi", f"hi{ONE}", f"{ONE}\n{TWO}", BAD]),
    ({"calls": CALLS, "required": True, "parallel": False}, [ONE], [ONE + TWO, ""]),
    ({"calls": CALLS, "separator": "\n"}, ["", ONE, f"{ONE}\n{TWO}"], [ONE + TWO, "hi"]),
    ({"calls": CALLS, "answer": ANSWER}, [ONE, ONE + TWO, '{"x": 1}'], ["", "hi", '{"x": "a"}', ONE + '{"x": 1}']),
    (
        {"calls": [{"begin": "", "end": "", "schema": {"properties": {"name": {"const": "f"}, "parameters": CITY}, "required": ["name", "parameters"], "type": "object", "additionalProperties": False}}], "answer": ANSWER, "parallel": False},
        ['{"name": "f", "parameters": {"city": "Rome"}}', '{"x": 1}'],
        ['{"name": "g", "parameters": {"city": "Rome"}}', '{"name": "f"}'],
    ),
    (
        {"calls": [{"begin": '{"name": "f", "arguments": ', "schema": CITY, "end": "}"}], "opening": "[CALLS][", "separator": ", ", "closing": "]", "triggers": ["[CALLS]"], "text": True},
        ["hi", '[CALLS][{"name": "f", "arguments": {"city": "A"}}, {"name": "f", "arguments": {"city": "B"}}]'],
        ['[CALLS][{"name": "f", "arguments": {"city": "A"}}', "[CALLS][]", "[CALLS]"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "good", "bad"), FORMS)
def test_a_tag_accepts_its_forms_and_nothing_else(
    judge: Judge, tag: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """A tag accepts calls of its schemas, and text in which no trigger stands outside a call."""
    assert [text for text in good if not accepted(judge, tag, text)] == []
    assert [text for text in bad if accepted(judge, tag, text)] == []


@pytest.mark.parametrize(
    ("tag", "pointer"),
    [
        ({"calls": []}, "#/calls"),
        (AUTO | {"triggers": []}, "#/triggers"),
        (AUTO | {"triggers": ["<other>"]}, "#/calls/0/begin"),
        (AUTO | {"answer": ANSWER}, "#/answer"),
        (AUTO | {"text": "yes"}, "#/text"),
        (AUTO | {"mode": 1}, "#"),
        ({"calls": [CALLS[0] | {"schema": {"properties": {"a": {"uniqueItems": True}}}}]}, "#/calls/0/schema/properties/a/uniqueItems"),
        ({"calls": CALLS, "answer": {"format": "color"}}, "#/answer/format"),
    ],
)  # fmt: skip
def test_a_tag_that_is_not_served_is_refused_at_its_place(tag: dict[str, Any], pointer: str) -> None:
    """The pointer of a refusal starts at the schema's place in the tag."""
    with pytest.raises(InvalidRequest) as refusal:
        lint(GrammarSource(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))

    assert refusal.value.param == pointer


def test_gaps_of_contained_schemas_are_listed_at_their_places() -> None:
    """Without strict, keywords of a tag's schemas that cannot be enforced are listed with their pointers."""
    tag = {"calls": [CALLS[0] | {"schema": {"uniqueItems": True}}], "answer": {"format": "color"}}

    found = lint(GrammarSource(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), strict=False))

    assert [pointer for pointer, _ in found.unenforced] == ["#/answer/format", "#/calls/0/schema/uniqueItems"]


def test_a_special_token_in_a_tag_is_the_token_and_not_its_text() -> None:
    """A trigger that is a special token matches only that token and not its text."""
    special = 257
    vocabulary = Vocabulary(
        (*BYTES.tokens, b""), BYTES.specials | {"<|call|>": special}, BYTES.eos_token_ids, "special"
    )
    tag = {"calls": [{"begin": "<|call|>f", "schema": CITY, "end": ";"}], "triggers": ["<|call|>"], "text": True}
    linted = lint(GrammarSource(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)), specials=vocabulary.specials)
    backend = LlguidanceBackend(vocabulary)
    compiled = backend.load(backend.compile(linted))

    with_token, with_text = compiled.matcher(), compiled.matcher()

    assert all(with_token.accept(token) for token in [*b"hi", special, *b'f{"city":"A"};'])
    assert with_token.is_complete()
    assert not all(with_text.accept(token) for token in b"hi<|call|>")
