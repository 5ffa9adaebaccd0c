"""Tests of the lint: refusals with pointers, unenforced keywords without strict, limits, and the choice of grammar
engine.
"""

import json
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from benchmarks.suite_cases import Judge, accepts
from jsonschema import Draft202012Validator

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.lint import GrammarEngine, LintedGrammar, lint
from graftwork.platform.errors import InvalidRequest


def linted(schema: Any, *, strict: bool = True) -> LintedGrammar:
    return lint(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict))


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems"),
        ({"properties": {"a/b": {"format": "color"}}}, "#/properties/a~1b/format"),
        ({"not": {"pattern": "a"}}, "#/not/pattern"),
        ({"not": {"items": {"type": "null"}}}, "#/not/items"),
        ({"anyOf": [{"$ref": "other.json"}]}, "#/anyOf/0/$ref"),
        ({"pattern": "(?=a)"}, "#/pattern"),
        ({"patternProperties": {"\\bx": {}}}, "#/patternProperties/\\bx"),
        ({"minLength": "3"}, "#/minLength"),
        ({"type": "text"}, "#/type"),
        ({"properties": {"a": 3}}, "#/properties/a"),
        ({"minProperties": 3}, "#/minProperties"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "#/maxProperties"),
        ({"contains": {}, "minContains": "x"}, "#/minContains"),
        ({"contains": {}, "maxContains": None}, "#/maxContains"),
        ({"dependentRequired": {"a": {"type": "object"}}}, "#/dependentRequired/a"),
        ({"dependentRequired": {"a": "b"}}, "#/dependentRequired/a"),
        ({"$ref": "#/x/²", "x": [{}]}, "#/$ref"),
        ({"not": {"const": "a" * 2000}}, "#/not/const"),
        ({"type": "integer", "minimum": 10**19}, "#/minimum"),
        ({"type": "integer", "not": {"const": 2**53 + 1}}, "#/not/const"),
        ({"type": "number", "not": {"const": 8129553314990220.0}}, "#/not/const"),
        ({"type": "number", "not": {"const": 0.12345678901234567}}, "#/not/const"),
        ({"$schema": "https://example.com/mine"}, "#/$schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_its_place(schema: Any, pointer: str) -> None:
    """A keyword that cannot be enforced is refused with its JSON pointer as param and in the message."""
    with pytest.raises(InvalidRequest) as refusal:
        linted(schema)

    assert refusal.value.param == pointer
    assert pointer in refusal.value.message


def test_without_strict_what_cannot_be_enforced_is_let_go_and_listed(judge: Judge) -> None:
    """Without strict a keyword that cannot be enforced is listed, and the rest is enforced."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "b": {"format": "color"},
        },
        "required": ["a"],
    }

    found = linted(schema, strict=False)
    compiled = judge.compiled(found)

    assert [pointer for pointer, _ in found.unenforced] == ["#/properties/a/uniqueItems", "#/properties/b/format"]
    assert accepts(compiled, {"a": [1, 1], "b": "x"})
    assert not accepts(compiled, {"a": ["x"]})


def test_without_strict_what_is_malformed_is_refused_all_the_same() -> None:
    """A malformed schema is refused with and without strict."""
    with pytest.raises(InvalidRequest):
        linted({"minLength": "3"}, strict=False)


NEGATIONS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"not": {"type": "string"}}, ["a", 1, None]),
    ({"not": {"minimum": 3}}, [2, 3, "a"]),
    ({"not": {"minLength": 3}}, ["", "ab", "abc", 3]),
    ({"not": {"maxItems": 1}}, [[], [1], [1, 2]]),
    ({"not": {"minProperties": 1}}, [{}, {"a": 1}]),
    ({"not": {"enum": [1, "a", None, []]}}, [1, 2, "a", "ab", "", None, True, [], [1]]),
    ({"not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"a": 1, "b": 1}, 3]),
    ({"not": {"properties": {"a": {"type": "integer"}}}}, [{"a": 1}, {"a": "x"}, {}, 3]),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}, [{"a": 1}, {"a": 1, "b": 1}, {"c": 1}, {}]),
    ({"oneOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"}, [1, 3, 5]),
    ({"dependentRequired": {"a": ["b"]}, "type": "object"}, [{}, {"a": 1}, {"a": 1, "b": 2}, {"b": 1}]),
    ({"contains": {"const": 1}, "maxContains": 1, "type": "array"}, [[], [1], [2, 1], [1, 1], [1, 2]]),
    ({"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "null"}}}], "type": "object"}, [{}, {"a": None}, {"a": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{}, {"x": 1}, {"y": 1}]),
    ({"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}], "unevaluatedProperties": False}, [{"a": 1}, {"a": 1, "b": 1}, {"c": 1}]),
    ({"type": ["string", "null"], "minLength": 2, "pattern": "^a", "maxLength": 3}, [None, "a", "ab", "bc", "abcd"]),
    ({"type": "object", "properties": {"enum": {"type": "string"}}, "required": ["enum"]}, [{}, {"enum": "a"}, {"enum": 1}]),
    ({"type": "object", "patternProperties": {"^\\d": {"type": "string"}, "^[0-9]": {"maxLength": 2}}, "additionalProperties": False}, [{"1": "ab"}, {"1": "abc"}, {"1": 1}]),
    ({"type": "object", "not": {"not": {"unevaluatedProperties": {"type": "string"}}}, "unevaluatedProperties": False}, [{}, {"a": "x"}]),
    ({"type": "array", "not": {"not": {"unevaluatedItems": {"type": "string"}}}, "unevaluatedItems": False}, [[], ["x"]]),
    ({"type": "object", "allOf": [{"patternProperties": {"^a": {"type": "string"}}}, {"additionalProperties": {"maxLength": 2}}]}, [{"ax": "ab"}, {"ax": "abc"}, {"ax": 1}]),
    ({"type": "integer", "format": "int64"}, [5, -(2**62), 1.5]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "values"), NEGATIONS)
def test_keywords_that_no_engine_knows_are_enforced(judge: Judge, schema: dict[str, Any], values: list[Any]) -> None:
    """Negations, conditions and exclusive unions are expanded into alternatives and enforced exactly."""
    compiled = judge.ours(schema)
    validator = Draft202012Validator(schema)

    assert [accepts(compiled, value) for value in values] == [validator.is_valid(value) for value in values]


def test_old_drafts_are_read_by_their_own_rules(judge: Judge) -> None:
    """Schemas of older drafts are read by the rules of their draft."""
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "definitions": {"small": {"type": "integer", "maximum": 5, "exclusiveMaximum": True}},
        "type": "array",
        "items": [{"$ref": "#/definitions/small", "maximum": 2}],
        "additionalItems": False,
    }
    compiled = judge.ours(schema)

    assert accepts(compiled, [4])
    assert not accepts(compiled, [5])
    assert not accepts(compiled, [4, 4])


def test_closed_objects_go_to_xgrammar_and_the_rest_to_llguidance() -> None:
    """Closed objects are compiled by xgrammar and all other schemas by llguidance."""
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}

    assert linted(closed).engine is GrammarEngine.XGRAMMAR
    assert linted(closed | {"additionalProperties": True}).engine is GrammarEngine.LLGUIDANCE
    assert linted(closed | {"properties": {"a": {"pattern": "x"}}}).engine is GrammarEngine.LLGUIDANCE


HOSTILE: dict[str, str] = {
    "enum": json.dumps({"enum": list(range(100_000))}),
    "nesting": '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000,
    "properties": json.dumps({"properties": {f"p{number}": {} for number in range(1000)}}),
    "items": json.dumps({"minItems": 1_000_000}),
    "repeats": json.dumps({"pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "loop": json.dumps({"$ref": "#"}),
    "two loops": json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    "endless": json.dumps({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}),
    "union": json.dumps({"anyOf": [{"properties": {f"k{number}": {}}} for number in range(2000)]}),
    "product": json.dumps(
        {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(30)]}
    ),
    "exclusion": json.dumps({"oneOf": [{"required": [f"k{number}"]} for number in range(200)]}),
    "references": json.dumps(
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2000)} | {"a2000": {}}}
    ),
    "values by unions": json.dumps(
        {
            "allOf": [
                {"enum": list(range(4096))},
                {"anyOf": [{"minimum": -number} for number in range(150)]},
                {"anyOf": [{"maximum": 5000 + number} for number in range(256)]},
            ]
        }
    ),
    "names by unions": json.dumps(
        {
            "required": [f"a{number}" for number in range(2000)],
            "anyOf": [{"required": [f"b{n}_{number}" for number in range(70)]} for n in range(250)],
        }
    ),
    "names by patterns": json.dumps(
        {
            "properties": {f"a{number}": {} for number in range(500)},
            "patternProperties": {f"^b{number}": {} for number in range(4000)},
        }
    ),
    "long text": json.dumps({"enum": ["a" * 100_000], "pattern": "b"}),
    "many texts": json.dumps({"enum": ["a" * 40 + str(n) for n in range(4000)], "pattern": "^(a?){1,1000}[0-9]*$"}),
    "half a code point": json.dumps({"pattern": "\\u{41"}),
    "a number without end": '{"type": "number", "maximum": 1e400}',
    "a count without end": '{"minLength": 1e400}',
    "surrogate": '{"const": "\\ud800"}',
    "no number": '{"const": NaN}',
}


def refusal_of(name: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        lint(GrammarSource(GrammarKind.JSON_SCHEMA, HOSTILE[name]))
    return refusal.value


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_before_anything_compiles(name: str) -> None:
    """A hostile schema is a 400 with a pointer before any compile."""
    refusal = refusal_of(name)

    assert refusal.param is not None
    assert refusal.param.startswith("#")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_in_seconds(name: str) -> None:
    """A hostile schema is refused within four seconds of processor time."""
    started = time.process_time()

    refusal_of(name)

    assert time.process_time() - started < 4


def num_calls(function: Callable[[], object]) -> int:
    """The calls that a function makes, of Python and of C: work that does not depend on the machine."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


LARGE: dict[str, Callable[[int], dict[str, Any]]] = {
    "properties": lambda count: {
        "properties": {f"a{number}": {} for number in range(count)},
        "required": [f"a{number}" for number in range(count)],
    },
    "patterns": lambda count: {"patternProperties": {f"^b{number}": {} for number in range(count)}},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_schema_costs_as_much_as_it_is_long(name: str) -> None:
    """A schema with twice the properties takes at most twice the calls."""
    small, large = ({"type": "object", **LARGE[name](count)} for count in (1000, 2000))

    assert num_calls(lambda: linted(large)) <= 2.2 * num_calls(lambda: linted(small))


@pytest.mark.parametrize(("name", "count"), [("properties", 5000), ("patterns", 4000)])
def test_a_schema_of_the_largest_size_is_served(name: str, count: int) -> None:
    """A schema with as many properties or patterns as the limits allow is accepted."""
    assert linted({"type": "object", **LARGE[name](count)}).engine is GrammarEngine.LLGUIDANCE
