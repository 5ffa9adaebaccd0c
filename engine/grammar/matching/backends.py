"""The two grammar engines for one vocabulary. Each is made at first use."""

from graftwork.engine.grammar.matching.matcher import GrammarBackend
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import GrammarEngine


class Backends:
    """The grammar engines of one process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: dict[GrammarEngine, GrammarBackend] = {}

    def of(self, engine: GrammarEngine) -> GrammarBackend:
        """Returns the backend of a grammar engine. Imports the engine at the first call."""
        if engine not in self._made:
            self._made[engine] = self._make(engine)
        return self._made[engine]

    def has(self, engine: GrammarEngine) -> bool:
        """Whether an engine is imported already."""
        return engine in self._made

    def warm(self) -> None:
        """Import and make both engines."""
        for engine in GrammarEngine:
            self.of(engine)

    def _make(self, engine: GrammarEngine) -> GrammarBackend:
        if engine is GrammarEngine.XGRAMMAR:
            from graftwork.engine.grammar.matching.xgrammar_backend import XgrammarBackend

            return XgrammarBackend(self._vocabulary)
        from graftwork.engine.grammar.matching.llguidance_backend import LlguidanceBackend

        return LlguidanceBackend(self._vocabulary)
