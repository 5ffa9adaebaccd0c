"""The interfaces of a grammar engine: a backend that compiles, and a matcher that follows tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.grammar.schema.lint import LintedGrammar

Words = NDArray[np.int32]
"""One row of a bitmask, 32 tokens a word, the lowest bit first."""


class Matcher(Protocol):
    """The state of one answer in a grammar. Not thread-safe."""

    def accept(self, token_id: int) -> bool:
        """Accept one token. Returns False, and changes nothing, if the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, words: Words) -> bool:
        """Set the bits of the tokens that may come next. Returns False if the engine has given up on this answer."""
        ...

    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        ...

    def forced_bytes(self) -> bytes:
        """Returns the bytes that must come next, as far as they are certain. They may be empty."""
        ...


class Compiled(Protocol):
    """A compiled grammar. It makes any number of matchers."""

    num_bytes: int

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, slots=True)
class CompiledPair:
    """The grammar that an answer must follow, and the compact one that its drafts come from."""

    held_to: Compiled
    guessed_from: Compiled | None
    """The same grammar in its compact spelling, or None."""

    @property
    def num_bytes(self) -> int:
        return self.held_to.num_bytes + (0 if self.guessed_from is None else self.guessed_from.num_bytes)


class GrammarBackend(Protocol):
    """One grammar engine for one vocabulary."""

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        """Compile a grammar, which may take long, into bytes for `load`. Raises ValueError with the engine's message.

        `compact` allows one spelling of each JSON answer, for drafts.
        """
        ...

    def load(self, payload: bytes) -> Compiled:
        """Load compiled bytes in this process."""
        ...
