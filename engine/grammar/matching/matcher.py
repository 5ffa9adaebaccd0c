"""Defines the interfaces of a grammar engine: a backend compiles grammars, and a matcher follows one answer in a
grammar.
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
        """Moves past one token of the answer. Returns False, and changes nothing, if the grammar does not allow the
        token.
        """
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, words: Words) -> bool:
        """Overwrites `words`, a row of a bitmask: the bits of the tokens that may come next are set, all others are
        cleared.

        Returns False if this answer exceeds a limit of the grammar engine.
        """
        ...

    def is_complete(self) -> bool:
        """Returns whether the grammar allows the answer to end here."""
        ...

    def forced_bytes(self) -> bytes:
        """Returns the UTF-8 bytes of the text that must come next, as far as it is certain. Empty if nothing is
        certain.
        """
        ...


class Compiled(Protocol):
    """A compiled grammar, from which any number of matchers can be made."""

    num_bytes: int

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, slots=True)
class CompiledPair:
    """Two compiled forms of one grammar: one that checks the answer, and a compact one from which drafts are taken."""

    held_to: Compiled
    guessed_from: Compiled | None
    """The compact form, which allows only one spelling of each answer; None if there is none."""

    @property
    def num_bytes(self) -> int:
        return self.held_to.num_bytes + (0 if self.guessed_from is None else self.guessed_from.num_bytes)


class GrammarBackend(Protocol):
    """Compiles and loads grammars for one grammar engine and one vocabulary."""

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        """Compiles a grammar and returns it as bytes, which `load` reads. This may take seconds.

        With `compact`, the compiled grammar allows only one spelling of each JSON answer; drafts are taken from it.
        Raises ValueError with the engine's message.
        """
        ...

    def load(self, payload: bytes) -> Compiled:
        """Makes the grammar that matchers can use from the bytes that `compile` returned. They may come from another
        process.
        """
        ...
