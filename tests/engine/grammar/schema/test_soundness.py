"""Tests of random schemas against jsonschema: every accepted value is valid."""

from collections.abc import Iterator
from decimal import Context, Decimal
from random import Random
from typing import Any

import pytest
from benchmarks.suite_cases import Judge, accepts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from graftwork.platform.errors import InvalidRequest
from tests.engine.grammar.random_schemas import PLAIN_SCHEMAS, SCHEMAS, VALUES
from tests.hypothesis_profiles import examples


def check(judge: Judge, schema: dict[str, Any], values: list[Any]) -> None:
    """Asserts that every accepted value is valid. A schema that is refused or that jsonschema cannot read is
    skipped."""
    try:
        compiled = judge.ours(schema)
    except InvalidRequest:
        return
    validator = Draft202012Validator(schema)
    for value in values:
        try:
            fits = validator.is_valid(value)
        except RecursionError:
            return
        assert fits or not accepts(compiled, value)


_TRIED = st.lists(VALUES, min_size=4, max_size=8)
_SETTINGS: dict[str, Any] = {
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.large_base_example]
}


@settings(max_examples=examples(250, in_search=20_000), **_SETTINGS)
@given(schema=SCHEMAS, values=_TRIED)
def test_what_is_accepted_fits(judge: Judge, schema: dict[str, Any], values: list[Any]) -> None:
    """Every accepted value of random schemas with forty keywords is valid for jsonschema."""
    check(judge, schema, values)


@settings(max_examples=examples(150), **_SETTINGS)
@given(schema=PLAIN_SCHEMAS, values=_TRIED)
def test_what_is_accepted_of_closed_objects_fits(judge: Judge, schema: dict[str, Any], values: list[Any]) -> None:
    """Every accepted value of random closed objects, which xgrammar compiles, is valid for jsonschema."""
    check(judge, schema, values)


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"const": "a\0b"}, ["a\0b"], ["ab", "a\1b", "a"]),
        ({"enum": ["\x1f", {"k": ["\0"]}]}, ["\x1f", {"k": ["\0"]}], ["\0", {"k": []}]),
        ({"type": "string", "enum": ["\0", "a"], "not": {"const": "\0"}}, ["a"], ["\0"]),
        (
            {"properties": {"a": {"const": "\0"}}, "required": ["a"], "additionalProperties": False, "type": "object"},
            [{"a": "\0"}],
            [{"a": ""}, {}],
        ),
    ],
)
def test_listed_values_hold_any_character(judge: Judge, schema: Any, accepted: list[Any], refused: list[Any]) -> None:
    """NUL and other control characters in const and enum are written as JSON writes them, and nothing else is."""
    compiled = judge.ours(schema)

    assert [accepts(compiled, value) for value in (*accepted, *refused)] == [True] * len(accepted) + [False] * len(
        refused
    )


def test_a_listed_control_character_opens_no_second_spelling_of_a_name(judge: Judge) -> None:
    """A forbidden name is not accepted with an escape, next to a list that needs escapes."""
    compiled = judge.ours({"anyOf": [{"enum": ["\0", "b"]}, {"type": "object", "properties": {"a": False}}]})

    matcher = compiled.matcher()
    assert not all(matcher.accept(byte) for byte in b'{"\\u0061":1}')
    assert accepts(compiled, {"b": 1})
    assert accepts(compiled, "b")


_NUMBERS = [-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2.25, 10, 12.5]
_EXTRA = [f"{number}{tail}" for number in (-2, -1, 0, 1, 2, 10, 12) for tail in ("", ".0", ".01", ".49", ".5", ".99")]


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
def test_bounds_of_numbers_are_exact(judge: Judge, kind: str, lower: str, upper: str) -> None:
    """No number outside its bounds is accepted, in any spelling and however near."""
    for low in _NUMBERS:
        for high in (number for number in _NUMBERS if number > low):
            schema = {"type": kind, lower: low, upper: high}
            try:
                compiled = judge.ours(schema)
            except InvalidRequest:
                continue  # no whole number lies between
            validator = Draft202012Validator(schema)
            for text in [*_EXTRA, *map(str, _NUMBERS)]:
                matcher = compiled.matcher()
                accepted = all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete()
                assert validator.is_valid(float(text)) or not accepted, (schema, text)


def nearby(limit: float) -> Iterator[Decimal]:
    """Returns decimals around a limit, at every distance that its digits reach."""
    exact = Decimal(repr(limit))
    for place in range(19):
        step = Decimal(1).scaleb(-place)
        yield from (exact - step, exact + step)
        cut = exact.quantize(step, context=Context(prec=60))
        yield from (cut, cut - step, cut + step)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_many_digits_are_exact(judge: Judge, seed: int) -> None:
    """Numbers are accepted within bounds of any size, exactly to the last digit of a double."""
    noise = Random(seed)
    for _ in range(40):
        size = 10.0 ** noise.randint(-8, 18)
        low = noise.uniform(-1, 1) * size
        low = noise.choice([low, int(low), float(f"{low:.14e}")])
        high = low + noise.choice([0.3, 1, 7.25, 1e6, size])
        lower = noise.choice([None, "minimum", "exclusiveMinimum"])
        upper = noise.choice(["maximum", "exclusiveMaximum"])
        schema = {"type": noise.choice(["number", "integer"])} | ({lower: low} if lower else {}) | {upper: high}
        try:
            compiled = judge.ours(schema)
        except InvalidRequest:
            continue  # nothing lies between, or what does is out of reach
        for number in (*nearby(low), *nearby(high)):
            matcher = compiled.matcher()
            if all(matcher.accept(byte) for byte in f"{number:f}".encode()) and matcher.is_complete():
                assert number < Decimal(repr(high)) or (upper == "maximum" and number == Decimal(repr(high))), schema
                assert not lower or number > Decimal(repr(low)) or (lower == "minimum" and number == Decimal(repr(low)))


@pytest.mark.parametrize("bound", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_bounds_of_large_whole_numbers_are_exact(judge: Judge, bound: str) -> None:
    """Bounds on whole numbers are exact beyond the precision of doubles."""
    for limit in (2**53 + 1, -(2**53) - 1, 2**60 + 3, 2**63 - 2, -(2**63) + 1):
        schema = {"type": "integer", bound: limit}
        try:
            compiled = judge.ours(schema)
        except InvalidRequest:
            continue
        for number in range(limit - 3, limit + 4):
            assert Draft202012Validator(schema).is_valid(number) or not accepts(compiled, number), (limit, number)


@pytest.mark.parametrize(
    "text",
    ['{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}', '{"a":"x"}'],
    ids=["escaped", "twice", "plain"],
)
def test_a_declared_name_cannot_be_written_in_another_way(judge: Judge, text: str) -> None:
    """A declared property's name cannot pass as an additional property by an escape."""
    compiled = judge.ours({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True})

    matcher = compiled.matcher()

    assert not all(matcher.accept(byte) for byte in text.encode())
