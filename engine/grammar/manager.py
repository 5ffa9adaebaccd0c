"""The grammar manager: tells the scheduler whether a request's grammar is ready, and follows each running request's
tokens in its grammar.

Owns one cursor for each running request that has a grammar. Never compiles and never blocks. A preempted request keeps
no grammar state: when it starts again, a new cursor reads all its tokens.
"""

from collections.abc import Iterable, Sequence

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.engine.grammar.compile.compiler import GrammarCompiled, GrammarCompiler
from graftwork.engine.grammar.compile.grammar_cache import GrammarKey
from graftwork.engine.grammar.matching.cursor import GrammarCursor, GrammarDrafts
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest
from graftwork.platform.ids import RequestId


class GrammarManager:
    """Compiled grammars and cursors of the engine's requests. Only the engine loop's thread calls it."""

    def __init__(
        self, compiler: GrammarCompiler | None, eos_token_ids: Iterable[int], limits: CompileLimits, clock: Clock
    ) -> None:
        """`compiler` is None for a model without a tokenizer. Then every grammar is refused."""
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
        """Start the compiles that the waiting requests need, in queue order."""
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
        """Returns the error if a request's grammar is known to be refused. None otherwise."""
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
            self._keys[request.request_id] = self._compiler.key(request.grammar, request.domain.hex())
        return self._keys[request.request_id]

    def absorb(self, compiled: GrammarCompiled) -> None:
        """Pass the result of a compile to the compiler's cache."""
        assert self._compiler is not None
        self._compiler.absorb(compiled)

    # ---- while it runs ----------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Open a cursor for a request whose grammar is ready, and move it over the tokens generated so far."""
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
        """Close a request's cursor. Does nothing for a request without a grammar."""
        self._cursors.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def cursor(self, request_id: RequestId) -> GrammarCursor | None:
        """Returns the cursor of a running request. None if the request has no grammar."""
        return self._cursors.get(request_id)

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int] = ()) -> MaskRow | None:
        """Returns a mask row for a request's next token, or for that after `drafts`, which the grammar must allow."""
        cursor = self._cursors.get(request_id)
        return None if cursor is None else cursor.row(drafted, banned)

    def constraint(self, request_id: RequestId) -> GrammarDrafts | None:
        """Returns what limits a running request's drafts to its grammar. None if the request has no grammar."""
        return self._drafts.get(request_id)

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Move a request's cursor by a token that was chosen with the cursor's mask.

        Returns an internal error if the grammar refuses the token, because the mask should have prevented it.
        """
        cursor = self._cursors.get(request_id)
        if cursor is None:
            return None
        self._drafts[request_id].follow(token_id)
        if cursor.accept(token_id):
            return None
        return InternalFailure(f"Token {token_id} was chosen against the grammar of request {request_id}.")

    def close_all(self) -> None:
        """Stop the compile server and the threads of the compiler."""
        if self._compiler is not None:
            self._compiler.close()

    def check_integrity(self, running: Iterable[RequestId]) -> None:
        assert self._cursors.keys() <= set(running)
        if self._compiler is not None:
            self._compiler.check_integrity()
