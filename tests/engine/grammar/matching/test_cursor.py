"""Tests of grammar cursors: rollback, ends, and masks."""

import json
from typing import Any

import numpy as np
import pytest
from benchmarks.suite_cases import BYTES, EOS, Judge
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.matcher import Words
from graftwork.engine.grammar.schema.lint import GrammarEngine, LintedGrammar, lint
from graftwork.platform.clock import Clock, ManualClock
from graftwork.platform.errors import InternalFailure, InvalidRequest
from tests.hypothesis_profiles import examples

PLAIN = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": False}
LOOSE = {"type": "array", "items": {"type": "string", "pattern": "^[ab]*$"}, "maxItems": 3}


def cursor(
    judge: Judge, source: GrammarSource, *, stops: tuple[int, ...] = (EOS,), clock: Clock | None = None
) -> GrammarCursor:
    return GrammarCursor(
        judge.compiled(lint(source)).matcher(), stops, BYTES.eos_token_ids, max_fill_s=1.0, clock=clock or ManualClock()
    )  # fmt: skip


def schema(value: Any) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(value))


def allowed(at: GrammarCursor, drafts: tuple[int, ...] = (), banned: tuple[int, ...] = ()) -> set[int]:
    words = empty()
    assert at.row(drafts, banned).fill(words) is None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def empty() -> Words:
    return np.zeros(-(-BYTES.size // 32), dtype=np.int32)


@pytest.mark.parametrize("value", [PLAIN, LOOSE], ids=["xgrammar", "llguidance"])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_rollback_leaves_what_a_fresh_walk_would_find(judge: Judge, value: Any, data: st.DataObject) -> None:
    """After any steps and rollbacks the mask equals that of a new cursor after the remaining tokens."""
    walked = cursor(judge, schema(value))
    kept: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        choices = sorted(allowed(walked))
        if not choices:
            break
        token = data.draw(st.sampled_from(choices))
        assert walked.accept(token)
        kept.append(token)
        back = data.draw(st.integers(0, len(kept)))
        if data.draw(st.booleans()):
            walked.rollback(back)
            kept = kept[: len(kept) - back]
    fresh = cursor(judge, schema(value))

    assert fresh.accept_all(kept) == len(kept)
    assert allowed(walked) == allowed(fresh)
    assert walked.is_over == fresh.is_over


@pytest.mark.parametrize("value", [PLAIN, LOOSE], ids=["xgrammar", "llguidance"])
def test_the_mask_behind_drafts_is_the_mask_after_them(judge: Judge, value: Any) -> None:
    """The mask behind drafts equals the mask after accepting them, and the cursor does not move."""
    text = {str(PLAIN): b'{"a": "y', str(LOOSE): b'["ab", "'}[str(value)]
    ahead, behind = cursor(judge, schema(value)), cursor(judge, schema(value))
    behind.accept_all(list(text))

    assert allowed(ahead, tuple(text)) == allowed(behind)
    assert ahead.num_accepted == 0
    assert ahead.num_allowed([*text, ord("?")]) == len(text)


def test_a_stop_token_is_allowed_only_where_the_answer_is_complete(judge: Judge) -> None:
    """A stop token is allowed only where the answer is complete, and it ends the answer."""
    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "ab?"))

    before = allowed(at)
    assert not at.accept(EOS)
    at.accept(ord("a"))
    after = allowed(at)

    assert before == {ord("a")}
    assert after == {ord("b"), EOS}
    assert at.accept(EOS)
    assert at.is_over
    assert not at.accept(ord("b"))


def test_a_stop_token_that_is_text_is_text_until_the_answer_is_complete(judge: Judge) -> None:
    """A stop token that is also text may be part of the answer until the answer is complete."""
    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "aab?"), stops=(EOS, ord("a")))

    assert at.accept_all(b"aa") == 2
    assert not at.is_over
    assert at.accept(ord("a"))
    assert at.is_over


def test_where_no_stop_is_left_the_mask_of_a_complete_answer_is_empty(judge: Judge) -> None:
    """If EOS is ignored or banned, a complete answer has an empty mask, which is no failure."""
    ignored = cursor(judge, GrammarSource(GrammarKind.REGEX, "a"), stops=())
    banned = cursor(judge, GrammarSource(GrammarKind.REGEX, "a"))
    ignored.accept(ord("a"))
    banned.accept(ord("a"))

    assert allowed(ignored) == set()
    assert allowed(banned, banned=(EOS,)) == set()


@pytest.mark.parametrize("engine", GrammarEngine)
def test_special_tokens_and_padding_are_never_allowed(judge: Judge, engine: GrammarEngine) -> None:
    """Where any text is allowed, every byte is allowed, but no special token and no id beyond the vocabulary."""
    kind = GrammarKind.EBNF if engine is GrammarEngine.XGRAMMAR else GrammarKind.REGEX
    text = "root ::= [^z]*" if engine is GrammarEngine.XGRAMMAR else "[^z]*"
    matcher = judge.compiled(LintedGrammar(engine, kind, text)).matcher()

    found = allowed(GrammarCursor(matcher, (), BYTES.eos_token_ids, max_fill_s=1.0, clock=ManualClock()))

    assert set(b"abc\n") <= found <= set(range(256)) - {ord("z")}


def test_a_dead_end_is_a_typed_error(judge: Judge) -> None:
    """A rule that can never end gives a typed error where its mask is empty."""
    linted = LintedGrammar(GrammarEngine.XGRAMMAR, GrammarKind.EBNF, 'root ::= root "a"')
    at = GrammarCursor(judge.compiled(linted).matcher(), (EOS,), (EOS,), max_fill_s=1.0, clock=ManualClock())

    error = at.row().fill(empty())

    assert isinstance(error, InvalidRequest)
    assert error.code == "grammar_dead_end"


def test_a_mask_for_another_length_is_not_filled(judge: Judge) -> None:
    """A mask for a row that was planned before the cursor moved is not filled."""
    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "ab"))
    row = at.row()
    at.accept(ord("a"))

    assert isinstance(row.fill(empty()), InternalFailure)


def test_drafts_that_do_not_fit_leave_the_cursor_where_it_was(judge: Judge) -> None:
    """Drafts that do not fit the grammar do not move the cursor."""
    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "abc"))

    with pytest.raises(AssertionError):
        at.row([ord("a"), ord("x")]).fill(empty())

    assert at.num_accepted == 0
    assert allowed(at) == {ord("a")}


def test_a_mask_that_takes_too_long_ends_its_request(judge: Judge) -> None:
    """A mask that takes too much processor time ends its request with an error."""

    class Slow(ManualClock):
        def worked(self) -> float:
            self.advance(2)
            return super().worked()

    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "ab"), clock=Slow())

    error = at.row().fill(empty())

    assert isinstance(error, InvalidRequest)
    assert error.code == "grammar_too_slow"


def test_a_mask_that_had_to_wait_for_the_processor_ends_nothing(judge: Judge) -> None:
    """A mask that only waited for the processor does not end its request."""

    class Busy(ManualClock):
        def monotonic(self) -> float:
            self.advance(2)
            return super().monotonic()

        def worked(self) -> float:
            return 0.0

    at = cursor(judge, GrammarSource(GrammarKind.REGEX, "ab"), clock=Busy())

    assert allowed(at) == {ord("a")}
