"""Checks a grammar before it is compiled, chooses the grammar engine, and writes the grammar for that engine.

This check (the lint) is pure Python with bounded cost. Invariant: the chosen engine enforces every keyword, or the
keyword is refused with its JSON pointer. If the caller is not strict, keywords that cannot be enforced are listed
instead.

xgrammar serves what it enforces exactly: plain JSON, EBNF, and schemas of closed objects. llguidance serves the rest.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.patterns.nodes import PatternError, repeats, written
from graftwork.engine.grammar.patterns.reader import read_whole
from graftwork.engine.grammar.schema.core_schema import CoreWriter
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.json_values import canonical
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.llguidance_schema import lists_controls, may_list_controls, spelled
from graftwork.engine.grammar.schema.plain_schemas import is_plain
from graftwork.engine.grammar.schema.schema_size import check_size
from graftwork.engine.grammar.schema.structural_tags import TagWriter, read_tag

_LIMITS = LintLimits()


class GrammarEngine(StrEnum):
    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


@dataclass(frozen=True, slots=True)
class LintedGrammar:
    """A grammar in the form that the grammar engine compiles, and the keywords that this form does not enforce
    (`unenforced`).
    """

    engine: GrammarEngine
    kind: GrammarKind
    text: str
    unenforced: tuple[tuple[str, str], ...] = ()
    """Pairs (JSON pointer of the keyword, reason). Empty if the caller is strict."""


def lint(
    source: GrammarSource, limits: LintLimits = _LIMITS, specials: Mapping[str, int] | None = None
) -> LintedGrammar:
    """Checks a grammar and rewrites it for a grammar engine.

    Raises InvalidRequest, whose `param` is the JSON pointer of the refused place. `specials` are the tokenizer's
    special tokens, which a structural tag (a description of an answer with tool calls) may name. Without `specials`,
    the result for a structural tag is good only as a check, because its special tokens are written as plain text.
    """
    size = len(source.text.encode(errors="surrogatepass"))
    if size > limits.text_bytes:
        raise refused("#", f"it has {size} bytes; at most {limits.text_bytes} are served.")
    unenforced = UnenforcedKeywords(source.strict)
    match source.kind:
        case GrammarKind.JSON_OBJECT:
            return LintedGrammar(GrammarEngine.XGRAMMAR, GrammarKind.JSON_SCHEMA, '{"type":"object"}')
        case GrammarKind.JSON_SCHEMA:
            core = core_schema(parsed(source.text), limits, unenforced)
            if is_plain(core):
                return LintedGrammar(GrammarEngine.XGRAMMAR, source.kind, canonical(core), unenforced.listed())
            return LintedGrammar(GrammarEngine.LLGUIDANCE, source.kind, spelled(core), unenforced.listed())
        case GrammarKind.REGEX:
            return LintedGrammar(GrammarEngine.LLGUIDANCE, source.kind, _regex(source.text, limits))
        case GrammarKind.EBNF:
            return LintedGrammar(GrammarEngine.XGRAMMAR, source.kind, source.text)
        case GrammarKind.STRUCTURAL_TAG:
            tag = read_tag(parsed(source.text), limits)
            text = TagWriter(tag, limits, unenforced, specials or {}).write()
            return LintedGrammar(GrammarEngine.LLGUIDANCE, source.kind, text, unenforced.listed())


def core_schema(schema: Any, limits: LintLimits, unenforced: UnenforcedKeywords) -> dict[str, Any]:
    """Returns the schema rewritten with only the few keywords that the grammar engines enforce exactly.

    Keywords that cannot be enforced are recorded in `unenforced`. Raises InvalidRequest if the schema is too large, if
    no value fits it, or if a keyword cannot be enforced and the grammar is strict.
    """
    check_size(schema, limits)
    core = CoreWriter(schema, limits, unenforced).write()
    if lists_controls(core) and not may_list_controls(core):
        return CoreWriter(schema, limits, unenforced, lists_controls=False).write()
    return core


def parsed(text: str) -> Any:
    """Parses a text as JSON.

    Raises InvalidRequest if the text is not JSON, is nested too deep, or has a number that is too large for a double.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_whole, parse_float=_finite)
        canonical(value).encode()  # half of a surrogate pair is not a character
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else f"it is no JSON: {error}"
        raise refused("#", f"{reason}.") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]}… is more than a number can be")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _regex(text: str, limits: LintLimits) -> str:
    if len(text) > limits.pattern_length:
        raise refused("#", f"the pattern is longer than {limits.pattern_length} characters.")
    try:
        pattern = read_whole(text)
    except PatternError as error:
        raise refused("#", f"the pattern is not served: {error}.") from None
    if repeats(pattern) > limits.pattern_repeats:
        raise refused("#", f"its counted repeats multiply to more than {limits.pattern_repeats}.")
    return written(pattern)
