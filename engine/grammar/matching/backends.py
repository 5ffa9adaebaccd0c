"""Makes the two grammar engines, xgrammar and llguidance, for one vocabulary.

Each engine is imported and made at first use, because importing xgrammar takes seconds.
"""

from graftwork.engine.grammar.matching.matcher import GrammarBackend
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import GrammarEngine


class Backends:
    """Owns the grammar engines of this process: xgrammar and llguidance, each made at first use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: dict[GrammarEngine, GrammarBackend] = {}

    def of(self, engine: GrammarEngine) -> GrammarBackend:
        """Returns the backend of a grammar engine. The first call imports the engine, which may take seconds."""
        if engine not in self._made:
            self._made[engine] = self._make(engine)
        return self._made[engine]

    def has(self, engine: GrammarEngine) -> bool:
        """Returns whether a grammar engine is already imported and its backend made."""
        return engine in self._made

    def warm(self) -> None:
        """Imports both grammar engines and makes their backends, so that no later call waits for an import."""
        for engine in GrammarEngine:
            self.of(engine)

    def _make(self, engine: GrammarEngine) -> GrammarBackend:
        if engine is GrammarEngine.XGRAMMAR:
            from graftwork.engine.grammar.matching.xgrammar_backend import XgrammarBackend

            return XgrammarBackend(self._vocabulary)
        from graftwork.engine.grammar.matching.llguidance_backend import LlguidanceBackend

        return LlguidanceBackend(self._vocabulary)
