"""Tests of Lark grammars as patterns, held against llguidance, which reads Lark by itself."""

import tracemalloc

import pytest
from benchmarks.suite_cases import Judge

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.matcher import Compiled
from graftwork.engine.grammar.schema.lint import GrammarEngine, LintedGrammar, lint
from graftwork.sessions.tools.lark import LarkError, lark_pattern
from tests.sessions.tools.cpu_limit import printed_within_limit

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk  // three ways to change a file
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A grammar of the form that coding agents send for their patches."""
SUM = """
start: sum
sum: term ((" + " | " - ") term)*
term: INT | "(" INT ")" | "\\u00e9" | "\\n"
%import common.INT
"""
OTHERS = 'start: A~2 B~1..3 ["." C]\nA: "a".."f"\nB: /[0-9]/\nC: /\\/?x/'

CASES = {
    PATCH: (
        [
            "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
            "*** Begin Patch\n*** Delete File: a\n*** End Patch\n",
            "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f\n-x\n+y\n z\n*** End of File\n*** End Patch\n",
        ],
        [
            "",
            "*** Begin Patch\n*** End Patch",
            "*** Begin Patch\n*** Add File: a\n*** End Patch",
            "*** Begin Patch\n*** Delete File: \n*** End Patch",
            "x*** Begin Patch\n*** Delete File: a\n*** End Patch",
            "*** Begin Patch\n*** Update File: a\nx\n*** End Patch",
        ],
    ),
    SUM: (["1", "12 + (3) - \u00e9", "\n"], ["", "1+2", "()", "1 +", "n"]),
    OTHERS: (["ab1", "fa123.x", "aa0./x"], ["a1", "abc1", "ab", "ab1234", "ab1.", "ag1"]),
}


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def whole(compiled: Compiled, text: str) -> bool:
    matcher = compiled.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete()


@pytest.mark.parametrize("grammar", CASES)
def test_the_pattern_matches_what_the_grammar_does(judge: Judge, grammar: str) -> None:
    """The pattern and the grammar itself accept and refuse the same texts."""
    good, bad = CASES[grammar]
    original = judge.compiled(LintedGrammar(GrammarEngine.LLGUIDANCE, GrammarKind.STRUCTURAL_TAG, grammar))
    pattern = judge.compiled(lint(GrammarSource(GrammarKind.REGEX, lark_pattern(grammar))))

    for compiled in (original, pattern):
        assert [text for text in good if not whole(compiled, text)] == []
        assert [text for text in bad if whole(compiled, text)] == []


REFUSED = {
    'begin: "a"': "no rule named start",
    "start: b": "no rule named b",
    'start: "(" start ")" | "x"': "recursive",
    'start: a\na: "x" b\nb: a?': "recursive",
    'start: "a"\n%ignore " "': "%ignore",
    "start: A\n%import common.SQL_COMMENT -> A": "%import",
    'start: "a"i': "flag",
    "start: /a/i": "flags",
    'start: ("a"': "not closed",
    'start: "a" )': "nothing fits",
    'start: "a"\nstart: "b"': "twice",
    '"a"': "before the first rule",
    "start: <[7]>": "no Lark",
    'start: %json {"type": "object"}': "%json",
    'start: "\\q"': "escape",
    'start: "ab".."c"': "range",
    "start: " + "(" * 100 + '"a"' + ")" * 100: "deep",
    "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), 'a40: "x"']): "too large",
    "\n".join(["start: a0", *(f"a{n}: a{n + 1}" for n in range(90)), 'a90: "x"']): "deep",
    'start: "a" ~ ' + "9" * 5000: "digits",
    'start: "a" ~ 1..' + "9" * 5000: "digits",
}


@pytest.mark.parametrize("grammar", REFUSED)
def test_what_no_pattern_can_say_is_refused(grammar: str) -> None:
    """The error says which part of the grammar is to blame."""
    with pytest.raises(LarkError, match=REFUSED[grammar]):
        lark_pattern(grammar)


def test_a_short_rule_that_is_named_often_takes_no_memory() -> None:
    """A grammar that is too large is refused before its parts are joined, which would be 300 MB here."""
    grammar = "a: /" + "x" * 16_000 + "/\nstart: " + "a " * 20_000
    tracemalloc.start()
    try:
        with pytest.raises(LarkError, match="too large"):
            lark_pattern(grammar)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 32 << 20


@pytest.mark.parametrize(
    "grammar",
    ['"%import common.INT" + " " * 60_000 + "!"', '"a:\\n" + "?" * 60_000'],
)
def test_a_hostile_grammar_takes_linear_work(grammar: str) -> None:
    """A grammar of the largest size is read in milliseconds. Work in the square of its size would exceed the limit."""
    program = f"""
from graftwork.sessions.tools.lark import LarkError, lark_pattern
try:
    lark_pattern({grammar})
except LarkError as error:
    print(error)
"""
    printed = printed_within_limit(program)

    assert "not served" in printed or "no rule named start" in printed
