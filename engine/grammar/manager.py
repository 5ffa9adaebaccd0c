"""The scheduler's way to grammars: whether a request's is ready, and where each running request stands in its own.

Owns one cursor for each running request that has a grammar. Never compiles and never blocks. A request that starts
again is put where its tokens have brought it, so that nothing of a grammar needs to be kept while it is away.
"""

from collections.abc import Iterable, Sequence

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.engine.grammar.compile.compiler import GrammarCompiled, GrammarCompiler, GrammarKey
from graftwork.engine.grammar.matching.cursor import GrammarCursor
from graftwork.engine.grammar.matching.drafts import GrammarDrafts
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest
from graftwork.platform.ids import RequestId


class GrammarManager:
    """All methods are called by the loop's thread."""

    def __init__(
        self, compiler: GrammarCompiler | None, eos_token_ids: Iterable[int], limits: CompileLimits, clock: Clock
    ) -> None:
        """Without a compiler, for a model without a tokenizer, every grammar is refused."""
        self._compiler = compiler
        self._eos_token_ids = tuple(eos_token_ids)
        self._limits = limits
        self._clock = clock
        self._cursors: dict[RequestId, GrammarCursor] = {}
        self._drafts: dict[RequestId, GrammarDrafts] = {}
        self._keys: dict[RequestId, GrammarKey] = {}
        self._refusals: dict[RequestId, GraftworkError] = {}

    # ---- before a request runs --------------------------------------------------------------------------------

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """What all waiting requests need, in their order: compiles are begun."""
        waiting = {request.request_id for request in requests}
        self._keys = {request_id: key for request_id, key in self._keys.items() if request_id in waiting}
        self._refusals.clear()
        if self._compiler is not None:
            self._compiler.forget_failures()
        for request in requests:
            if request.grammar is None or self._compiler is None:
                continue
            key = self._key(request)
            if (error := self._compiler.want(key, request.grammar, request.domain.hex())) is not None:
                self._refusals[request.request_id] = error

    def is_ready(self, request: EngineRequest) -> bool:
        """Whether a request may start now."""
        if request.grammar is None or self._compiler is None:
            return True
        return self._compiler.get(self._key(request)) is not None

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Why a request cannot have its grammar, where that is known."""
        if request.grammar is None:
            return None
        if self._compiler is None:
            return InvalidRequest("This model has no tokenizer.json: grammars need one.", param="grammar")
        outcome = self._compiler.get(self._key(request))
        if isinstance(outcome, GraftworkError):
            return outcome
        return self._refusals.get(request.request_id) if outcome is None else None

    def _key(self, request: EngineRequest) -> GrammarKey:
        assert self._compiler is not None
        assert request.grammar is not None
        if request.request_id not in self._keys:
            self._keys[request.request_id] = self._compiler.key(request.grammar)
        return self._keys[request.request_id]

    def absorb(self, compiled: GrammarCompiled) -> None:
        """Take the end of a compile in."""
        assert self._compiler is not None
        self._compiler.absorb(compiled)

    # ---- while it runs ----------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Start a ready grammar and follow what has been generated already."""
        if request.grammar is None:
            return
        assert self._compiler is not None
        compiled = self._compiler.get(self._key(request))
        assert compiled is not None
        assert not isinstance(compiled, GraftworkError)
        cursor = GrammarCursor(
            compiled.held_to.matcher(),
            stop_token_ids,
            self._eos_token_ids,
            max_fill_s=self._limits.fill_seconds,
            clock=self._clock,
        )
        cursor.accept_all(generated)
        self._cursors[request.request_id] = cursor
        guess = None if compiled.guessed_from is None else compiled.guessed_from.matcher()
        drafts = self._drafts[request.request_id] = GrammarDrafts(cursor, guess, self._compiler.speller)
        for token_id in generated:
            drafts.follow(token_id)
        del self._keys[request.request_id]

    def close(self, request_id: RequestId) -> None:
        """Forget a request; one without a grammar is not known here."""
        self._cursors.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def cursor(self, request_id: RequestId) -> GrammarCursor | None:
        """Where a running request stands; None where it is free."""
        return self._cursors.get(request_id)

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int] = ()) -> MaskRow | None:
        """The mask of a request's next token, or of the one behind some drafts that its grammar allows."""
        cursor = self._cursors.get(request_id)
        return None if cursor is None else cursor.row(drafted, banned)

    def constraint(self, request_id: RequestId) -> GrammarDrafts | None:
        """What a running request's drafts must keep to; None where it is free."""
        return self._drafts.get(request_id)

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Follow a token that was chosen under the mask; an error ends that request, and is our fault."""
        cursor = self._cursors.get(request_id)
        if cursor is None:
            return None
        self._drafts[request_id].follow(token_id)
        if cursor.accept(token_id):
            return None
        return InternalFailure(f"Token {token_id} was chosen against the grammar of request {request_id}.")

    def close_all(self) -> None:
        """End the compiler's processes and threads."""
        if self._compiler is not None:
            self._compiler.close()

    def check_integrity(self, running: Iterable[RequestId]) -> None:
        assert self._cursors.keys() <= set(running)
        if self._compiler is not None:
            self._compiler.check_integrity()
