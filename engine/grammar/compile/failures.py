"""Finds the place in a schema that a grammar engine could not compile, and words the error for the caller.

The engine's own message quotes expressions that the lint wrote for the engine and that the caller has never seen. So
each part of the schema with a pattern is compiled alone, the innermost parts first. The error names the first part that
fails. A grammar in EBNF is the caller's own text, so the error quotes the engine's message.
"""

import json
from collections.abc import Callable, Generator
from itertools import islice
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.errors import refused
from graftwork.engine.grammar.schema.lint import LintedGrammar, lint
from graftwork.platform.errors import InvalidRequest

_MOST_PARTS = 64
_MOST_QUOTED = 500
_PATTERNS = frozenset({"pattern", "patternProperties"})

Compile = Callable[[LintedGrammar], object]
"""A function that compiles a grammar. Raises ValueError or RuntimeError if the engine cannot compile it."""


def compile_refusal(source: GrammarSource, error: Exception, compile_part: Compile) -> InvalidRequest:
    """Returns the error that a caller gets for a grammar whose compile ended with `error`.

    `compile_part` compiles parts of the grammar, to find the one that fails.
    """
    match source.kind:
        case GrammarKind.EBNF:
            return refused("#", str(error)[:_MOST_QUOTED])
        case GrammarKind.REGEX:
            return refused("#", "the pattern is too complex. Simplify it.")
    for pointer, part in islice(_parts(json.loads(source.text), "#"), _MOST_PARTS):
        if _fails(part, compile_part):
            return refused(pointer, "the patterns here are too complex. Simplify them.")
    return refused("#", "the schema is too complex for the grammar engine. Simplify it.")


def _parts(value: Any, pointer: str) -> Generator[tuple[str, dict[str, Any]], None, bool]:
    """Yields the parts of a schema that contain a pattern, each with its JSON pointer. Yields the innermost first.

    Returns whether `value` contains a pattern. Visits each part once.
    """
    contains = False
    if isinstance(value, list):
        for index, item in enumerate(value):
            contains |= yield from _parts(item, f"{pointer}/{index}")
    if not isinstance(value, dict):
        return contains
    for key, item in value.items():
        contains |= yield from _parts(item, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")
        contains |= key in _PATTERNS
    if isinstance(value.get("pattern"), str):
        yield f"{pointer}/pattern", {"type": "string", "pattern": value["pattern"]}
    if contains:
        yield pointer, value
    return contains


def _fails(part: dict[str, Any], compile_part: Compile) -> bool:
    """Returns whether the grammar engine cannot compile a part of a schema.

    Returns False for a part that the lint refuses, for example because a reference in it points to another part.
    """
    try:
        compile_part(lint(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(part), strict=False)))
    except (ValueError, RuntimeError):
        return True
    except InvalidRequest:
        return False
    return False
