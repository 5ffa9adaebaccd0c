"""Connects the grammar engine xgrammar to the interfaces in matcher.py, for one vocabulary.

The first import of this module takes seconds.
"""

import numpy as np
import xgrammar

from graftwork.engine.core.requests import GrammarKind
from graftwork.engine.grammar.matching.matcher import Words
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import LintedGrammar

MAX_WHITESPACE = 8
"""The most whitespace characters between two tokens of JSON. Without this limit, some models fill their answers with
them.
"""


class XgrammarMatcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._last_word = (1 << (vocab_size - 1) % 32 + 1) - 1

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill(self, words: Words) -> bool:
        words.fill(-1)
        self._matcher.fill_next_token_bitmask(words[None, :], 0)
        words.view(np.uint32)[-1] &= np.uint32(self._last_word)  # bits beyond the vocabulary, which may still be set
        return True

    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced_bytes(self) -> bytes:
        return str(self._matcher.find_jump_forward_string()).encode()


class XgrammarCompiled:
    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._compiled, self._vocab_size)


class XgrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocab_size = vocabulary.size
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            if grammar.kind is GrammarKind.EBNF:
                compiled = compiler.compile_grammar(grammar.text)
            elif compact:
                compiled = compiler.compile_json_schema(
                    grammar.text, strict_mode=False, any_whitespace=False, separators=(", ", ": ")
                )
            else:
                compiled = compiler.compile_json_schema(
                    grammar.text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return str(compiled.serialize_json()).encode()

    def load(self, payload: bytes) -> XgrammarCompiled:
        compiled = xgrammar.CompiledGrammar.deserialize_json(payload.decode(), self._info)
        return XgrammarCompiled(compiled, self._vocab_size)
