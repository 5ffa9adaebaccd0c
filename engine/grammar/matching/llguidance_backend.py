"""Connects the grammar engine llguidance to the interfaces in matcher.py, for one vocabulary.

llguidance parses the grammar while it follows an answer. So a compile only checks the limits, and its result is the
grammar's text.
"""

from dataclasses import replace
from typing import Any

import llguidance
import numpy as np

from graftwork.engine.core.requests import GrammarKind
from graftwork.engine.grammar.matching.matcher import Words
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import LintedGrammar
from graftwork.engine.grammar.schema.llguidance_schema import compacted

_EVERY_SPELLING = '%llguidance {"no_forcing": true}\n'
_STEP_FUEL = 100_000
"""The most lexer steps for one mask; about 14,000 steps take a millisecond.

An answer that needs more ends with a typed error.
"""
_STEP_ITEMS = 20_000
_STATE_BYTES = 256 * 1024
"""The number of bytes that the cache counts for one compiled grammar. Eight times the length of its text is added."""


class _Tokenizer:
    """Implements the tokenizer interface that llguidance needs. The engine never tokenizes text with it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        names = {token_id: content for content, token_id in vocabulary.specials.items()}
        self.tokens = [
            token or b"\xff" + names.get(token_id, f"<|unused{token_id}|>").encode()
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [token_id for token_id, token in enumerate(vocabulary.tokens) if not token]
        self._by_byte = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._by_byte[bytes([byte])] for byte in data if bytes([byte]) in self._by_byte]


class LlguidanceMatcher:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill(self, words: Words) -> bool:
        words.fill(0)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._matcher.is_error()

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def forced_bytes(self) -> bytes:
        return bytes(self._matcher.compute_ff_bytes())


class LlguidanceCompiled:
    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy())


class LlguidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        wrapper: Any = llguidance.TokenizerWrapper(_Tokenizer(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
        )
        self._limits = llguidance.LLParserLimits(
            step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, verbose_errors=False
        )
        self._num_words = -(-vocabulary.size // 32)

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        text = _as_llguidance(replace(grammar, text=compacted(grammar.text)) if compact else grammar)
        matcher = self._matcher(text)
        if matcher.fill(np.zeros(self._num_words, dtype=np.int32)):
            return text.encode()
        raise ValueError("its first step is too complex")

    def load(self, payload: bytes) -> LlguidanceCompiled:
        text = payload.decode()
        return LlguidanceCompiled(self._matcher(text)._matcher, _STATE_BYTES + 8 * len(payload))

    def _matcher(self, text: str) -> LlguidanceMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LlguidanceMatcher(matcher)


def _as_llguidance(grammar: LintedGrammar) -> str:
    """Returns the grammar in Lark form, with options that allow every token that spells allowed text.

    By default llguidance allows only one spelling of forced text, which disturbs a model that has learned another
    spelling.
    """
    match grammar.kind:
        case GrammarKind.REGEX:
            rules = f"start: /{grammar.text}/"
        case GrammarKind.STRUCTURAL_TAG:
            rules = grammar.text
        case _:
            rules = f"start: %json {grammar.text}"
    return str(llguidance.LLMatcher.grammar_from_lark(_EVERY_SPELLING + rules))
