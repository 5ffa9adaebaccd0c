"""Tests of how the place of a pattern that does not compile is found."""

import json
import sys
from types import FrameType
from typing import Any, Self

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.compile.failures import compile_refusal
from graftwork.engine.grammar.schema.lint import LintedGrammar


class DumpCounter:
    """Counts the calls of `json.dumps` by the module under test, in a `with` block."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        caller = frame.f_back
        if event == "call" and frame.f_code is json.dumps.__code__ and caller is not None:
            self.calls += caller.f_code.co_filename == compile_refusal.__code__.co_filename


def source(schema: dict[str, Any]) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=False)


def nested(levels: int, inner: dict[str, Any]) -> dict[str, Any]:
    schema = inner
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_only_parts_with_a_pattern_are_tried() -> None:
    """Of a deep schema, only the few parts that contain a pattern are written as JSON, and the error names none."""
    schema = {"properties": {"deep": nested(50, {"enum": ["pattern"]}), "easy": {"type": "string", "pattern": "^a$"}}}
    compiled: list[LintedGrammar] = []

    with DumpCounter() as dumps:
        refusal = compile_refusal(source(schema), ValueError("no"), compiled.append)

    assert refusal.param == "#"
    assert compiled
    assert dumps.calls == 4  # the pattern, its string, the properties, the whole


def test_the_innermost_part_that_fails_is_named() -> None:
    """The error names the first part, from the inside, that does not compile."""
    hard = {"type": "string", "pattern": "^(a|b)$"}
    schema = {"type": "object", "properties": {"a/b": nested(3, hard), "c": {"patternProperties": {"^x": {}}}}}

    def fail(_part: LintedGrammar) -> None:
        raise RuntimeError("too complex")

    refusal = compile_refusal(source(schema), ValueError("no"), fail)

    assert refusal.param == "#/properties/a~1b/properties/a/properties/a/properties/a/pattern"
