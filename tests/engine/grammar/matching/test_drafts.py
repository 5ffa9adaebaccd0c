"""Tests of the drafts that a grammar gives: text that the grammar forces or most programs write."""

import json
from typing import Any

import pytest
from benchmarks.suite_cases import BYTES, Judge
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.cursor import GrammarCursor, GrammarDrafts, Speller
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.clock import ManualClock
from tests.hypothesis_profiles import examples

EOS = 256
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"const": "celsius"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def drafts_of(judge: Judge, schema: Any, written: bytes = b"") -> tuple[GrammarCursor, GrammarDrafts]:
    linted = lint(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), True))
    cursor = GrammarCursor(judge.compiled(linted).matcher(), (EOS,), (EOS,), max_fill_s=10.0, clock=ManualClock())
    drafts = GrammarDrafts(cursor, judge.compiled(linted, compact=True).matcher(), Speller(BYTES))
    assert cursor.accept_all(written) == len(written)
    for token_id in written:
        drafts.follow(token_id)
    return cursor, drafts


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b'{"name":', b' "get_weather", "arguments": {"city": "'),
        (b'{"name": "get_weather", "arguments": {"city": "Oslo",', b' "unit": "celsius"}}'),
        (b'{"name": "get_weather", "arguments": {"city": "Os', b""),
    ],
)
def test_a_call_is_drafted_up_to_the_first_choice(judge: Judge, written: bytes, expected: bytes) -> None:
    """A call is drafted across forced text and usual whitespace up to one token before the first choice."""
    cursor, drafts = drafts_of(judge, CALL, written)
    length = cursor.num_accepted

    drafted = bytes(drafts.forced_token_ids(100))

    assert expected[:-1].startswith(drafted)
    assert len(drafted) >= len(expected) - 2
    assert cursor.num_accepted == length
    assert drafts.forced_token_ids(3) == tuple(expected[:3] if len(drafted) >= 3 else drafted)


def test_a_speller_takes_the_longest_tokens() -> None:
    """The speller uses the longest tokens that fit, and stops at text without a token."""
    vocabulary = Vocabulary((b"", b"a", b"ab", b"abc", b"c"), {}, (0,), "test")

    assert Speller(vocabulary).spell(b"ababcc") == [2, 3, 4]
    assert Speller(vocabulary).spell(b"abx") == [2]


@settings(max_examples=examples(30))
@given(city=st.text("Oslo ", max_size=5), cut=st.integers(0, 80))
def test_what_is_drafted_is_allowed_wherever_the_answer_stands(judge: Judge, city: str, cut: int) -> None:
    """Behind every prefix of a call, each drafted token is allowed by the grammar."""
    call = {"name": "get_weather", "arguments": {"city": city, "unit": "celsius"}}
    text = json.dumps(call, indent=cut % 3 or None).encode()[:cut]
    cursor, drafts = drafts_of(judge, CALL, text)

    drafted = drafts.forced_token_ids(50)

    assert cursor.accept_all(drafted) == len(drafted)
