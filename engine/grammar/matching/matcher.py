"""What the two grammar engines are to the rest: something that compiles, and a state that walks over tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.grammar.schema.lint import LintedGrammar

Words = NDArray[np.int32]
"""One row of a bitmask, 32 tokens a word, the lowest bit first."""


class Matcher(Protocol):
    """The state of one answer. Not for two threads at once."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and no change, where the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, words: Words) -> bool:
        """Set the bits of the tokens that may come next; False where the engine has given up on this answer."""
        ...

    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        ...

    def forced_bytes(self) -> bytes:
        """What must come next, as far as that is certain; may be empty."""
        ...


class Compiled(Protocol):
    """A grammar that is ready: makes any number of matchers."""

    num_bytes: int

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, slots=True)
class CompiledPair:
    """What an answer is held to, and what it is guessed from."""

    held_to: Compiled
    guessed_from: Compiled | None
    """The same grammar in its compact spelling; None where there is none."""

    @property
    def num_bytes(self) -> int:
        return self.held_to.num_bytes + (0 if self.guessed_from is None else self.guessed_from.num_bytes)


class GrammarBackend(Protocol):
    """One engine over one vocabulary."""

    def compile(self, grammar: LintedGrammar, *, compact: bool = False) -> bytes:
        """The work that may take long, in a form that travels. Raises ValueError with what the engine says.

        `compact` allows one spelling of each JSON answer, for drafts.
        """
        ...

    def load(self, payload: bytes) -> Compiled:
        """What has been compiled, in this process."""
        ...
