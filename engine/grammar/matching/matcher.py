"""Defines the interfaces of a grammar engine: a backend that compiles a grammar, and a matcher that follows tokens in
it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.grammar.schema.lint import LintedGrammar

Words = NDArray[np.int32]
"""One row of a bitmask, [ceil(vocab / 32)]. Each word has the bits of 32 tokens, the lowest bit first."""


class Matcher(Protocol):
    """Tracks the position of one answer in a grammar. Not thread-safe."""

    def accept(self, token_id: int) -> bool:
        """Accepts one token. Returns False, and changes nothing, if the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, words: Words) -> bool:
        """Overwrites `words` with the bits of the tokens that may come next. Returns False if the engine gave up on
        this answer.
        """
        ...

    def is_complete(self) -> bool:
        """Returns whether the answer may end here."""
        ...

    def forced_bytes(self) -> bytes:
        """Returns the bytes that must come next, as far as they are certain. The result may be empty."""
        ...


class Compiled(Protocol):
    """A compiled grammar, from which any number of matchers can be made."""

    num_bytes: int

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, slots=True)
class CompiledPair:
    """The grammar that an answer must follow, and the compact one that its drafts come from."""

    held_to: Compiled
    guessed_from: Compiled | None
    """The same grammar with only one spelling of each answer; None if there is none."""

    @property
    def num_bytes(self) -> int:
        return self.held_to.num_bytes + (0 if self.guessed_from is None else self.guessed_from.num_bytes)


class GrammarBackend(Protocol):
    """Compiles and loads grammars for one grammar engine and one vocabulary."""

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        """Compiles a grammar into bytes for `load`. This may take seconds. Raises ValueError with the engine's message.

        `compact` allows only one spelling of each JSON answer, for drafts.
        """
        ...

    def load(self, payload: bytes) -> Compiled:
        """Loads compiled bytes in this process."""
        ...
