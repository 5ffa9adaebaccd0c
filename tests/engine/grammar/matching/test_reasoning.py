"""Tests of ReasoningMatcher: what may stand before an answer, and that the grammar holds behind it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.suite_cases import BYTES, EOS, Judge
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import GrammarKind, GrammarSource, ReasoningRule
from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.matcher import Matcher
from graftwork.engine.grammar.matching.reasoning import ReasoningMatcher
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.clock import ManualClock
from tests.hypothesis_profiles import examples

OPEN, CLOSE, GAP = 1, 2, 10
RULE = ReasoningRule(OPEN, CLOSE, gap_token_ids=(GAP,))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
EVERY = set(range(BYTES.size)) - {EOS}


def answer_matcher(judge: Judge) -> Matcher:
    return judge.compiled(lint(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))).matcher()


def cursor(judge: Judge, rule: ReasoningRule, *, has_grammar: bool) -> GrammarCursor:
    matcher = ReasoningMatcher(rule, answer_matcher(judge) if has_grammar else None)
    return GrammarCursor(matcher, (EOS,), BYTES.eos_token_ids, max_fill_s=1.0, clock=ManualClock())


def bits(at: GrammarCursor) -> set[int]:
    words = np.zeros(-(-BYTES.size // 32), dtype=np.int32)
    assert at.row().fill(words) is None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: BYTES.size]).tolist())


def allowed_after(judge: Judge, rule: ReasoningRule, tokens: list[int], *, has_grammar: bool) -> set[int]:
    """What may follow these tokens, found by splitting them at their tags and asking the grammar alone."""
    rest = tokens
    if rule.is_open or tokens[:1] == [OPEN]:
        reasoned = tokens if rule.is_open else tokens[1:]
        if CLOSE not in reasoned:
            is_spent = rule.max_tokens is not None and len(reasoned) >= rule.max_tokens
            return {CLOSE} if is_spent else EVERY
        rest = reasoned[reasoned.index(CLOSE) + 1 :]
        extra = {GAP} if not rest else set()
        rest = rest[1:] if rest[:1] == [GAP] else rest
    else:
        extra = {OPEN} if not tokens else set()
    if not has_grammar:
        return EVERY | {EOS} | extra
    plain = GrammarCursor(answer_matcher(judge), (EOS,), BYTES.eos_token_ids, max_fill_s=1.0, clock=ManualClock())
    assert plain.accept_all(rest) == len(rest)
    return bits(plain) | extra


@settings(max_examples=examples(60))
@given(
    data=st.data(),
    is_open=st.booleans(),
    budget=st.none() | st.integers(0, 4),
    has_grammar=st.booleans(),
)
def test_every_walk_allows_what_its_parts_allow(
    judge: Judge, data: st.DataObject, is_open: bool, budget: int | None, has_grammar: bool
) -> None:
    """After any steps and rollbacks, the same tokens may follow as by the rule and the grammar alone."""
    rule = replace(RULE, is_open=is_open, max_tokens=budget)
    walked, kept = cursor(judge, rule, has_grammar=has_grammar), list[int]()
    for _ in range(data.draw(st.integers(1, 14))):
        allowed = bits(walked)
        assert allowed == allowed_after(judge, rule, kept, has_grammar=has_grammar)
        likely = sorted(allowed & {OPEN, CLOSE, GAP, *b'{"a": xy}'} - {EOS}) or sorted(allowed - {EOS})
        if not likely:
            break
        token = data.draw(st.sampled_from(likely))
        assert walked.accept(token)
        kept.append(token)
        forbidden = sorted(set(range(BYTES.size)) - bits(walked))
        if forbidden:
            assert not walked.accept(data.draw(st.sampled_from(forbidden)))
        if data.draw(st.booleans()):
            back = data.draw(st.integers(0, len(kept)))
            walked.rollback(back)
            kept = kept[: len(kept) - back]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_after_exactly_its_tokens(judge: Judge, budget: int) -> None:
    """The closing tag is the only token behind the last one of the budget, and the answer cannot end before it."""
    rule = replace(RULE, is_open=True, max_tokens=budget)
    walked = cursor(judge, rule, has_grammar=True)

    assert walked.accept_all([ord("t")] * 9) == budget
    assert bits(walked) == {CLOSE}
    assert not walked.is_complete
    assert walked.accept_all([CLOSE, *b'{"a": "x"}', EOS]) == 12
    assert walked.is_over


def test_no_draft_is_made_before_the_answer(judge: Judge) -> None:
    """What the grammar dictates is no draft of the reasoning, nor of the first token, which may be a line break."""
    rule = replace(RULE, is_open=True)
    matcher = ReasoningMatcher(rule, answer_matcher(judge))

    inside = matcher.forced_bytes()
    for token in (ord("t"), CLOSE):
        assert matcher.accept(token)
    behind = matcher.forced_bytes()
    assert all(map(matcher.accept, b'{"'))

    assert (inside, behind) == (b"", b"")
    assert matcher.forced_bytes().startswith(b"a")
