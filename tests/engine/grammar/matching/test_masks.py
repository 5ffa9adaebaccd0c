"""Tests of masks: they forbid what breaks the grammar and allow every spelling of what fits it."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.backends import Backends
from graftwork.engine.grammar.matching.vocabulary import Vocabulary, read_vocabulary
from graftwork.engine.grammar.schema.lint import lint

MODEL = Path(__file__).parents[4] / "demo" / "model"
OPEN = {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}
CLOSED = OPEN | {"additionalProperties": False}
TAG = {
    "calls": [{"begin": '<tool_call>\n{"name": "get_order", "arguments": ', "schema": OPEN, "end": "}\n</tool_call>"}],
    "triggers": ["<tool_call>"],
    "text": True,
}
CALL = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "PXX-50037"}}\n</tool_call>'
CASES = [
    (GrammarKind.JSON_SCHEMA, json.dumps(OPEN), '{"order_id": "PXX-50037"}'),
    (GrammarKind.JSON_SCHEMA, json.dumps(CLOSED), '{"order_id": "PXX-50037"}'),
    (GrammarKind.REGEX, "The order arguments: [a-z]+/\\d", "The order arguments: weather/7"),
    (GrammarKind.STRUCTURAL_TAG, json.dumps(TAG), CALL),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    found = read_vocabulary(MODEL, 1024, (1017,))
    assert found is not None
    return found


@pytest.mark.parametrize(("kind", "text", "answer"), CASES, ids=["llguidance", "xgrammar", "regex", "tag"])
def test_the_model_s_own_spelling_is_allowed(vocabulary: Vocabulary, kind: GrammarKind, text: str, answer: str) -> None:
    """Every token of an answer, as the tokenizer spells it, is allowed by its mask."""
    linted = lint(GrammarSource(kind, text), specials=vocabulary.specials)
    backend = Backends(vocabulary).of(linted.engine)
    matcher = backend.load(backend.compile(linted)).matcher()
    words = np.zeros(32, dtype=np.int32)

    barred = []
    for token_id in Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(answer).ids:
        assert matcher.fill(words)
        if not words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1:
            barred.append(vocabulary.tokens[token_id])
        assert matcher.accept(token_id)

    assert barred == []
    assert matcher.is_complete()
