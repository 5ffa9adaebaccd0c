"""Tells the scheduler whether a request's grammar is ready, and follows each running request's tokens in its grammar.

Owns one GrammarCursor for each running request that has a grammar. A cursor is the position of the request's answer in
the grammar. Never compiles and never blocks. A preempted request loses its cursor. When the request starts again, a new
cursor reads all tokens of the answer.
"""

from collections.abc import Iterable, Sequence

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.engine.grammar.compile.compiler import GrammarCompiled, GrammarCompiler
from graftwork.engine.grammar.compile.grammar_cache import GrammarKey
from graftwork.engine.grammar.matching.cursor import GrammarCursor, GrammarDrafts
from graftwork.engine.grammar.matching.matcher import Matcher
from graftwork.engine.grammar.matching.reasoning import ReasoningMatcher
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId


class GrammarManager:
    """Owns a GrammarCursor (the position in the grammar) for each running request that has a grammar.

    Only the engine loop's thread calls it.
    """

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

    @property
    def num_bytes(self) -> int:
        """Bytes of all cached grammars."""
        return 0 if self._compiler is None else self._compiler.num_bytes

    # ---- before a request runs --------------------------------------------------------------------------------

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Queues the grammars of the waiting requests for compiling, in the order of the requests.

        A grammar that is cached or queued already is not queued again.
        """
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

    def forget_domain(self, domain: IsolationDomain) -> None:
        """Drops the compiled grammars of a domain (group of callers). Running requests keep theirs to their end."""
        if self._compiler is not None:
            self._compiler.forget_domain(domain.hex())

    def is_ready(self, request: EngineRequest) -> bool:
        """Returns whether the compile of the request's grammar has ended, with a compiled grammar or with a refusal.

        Also True for a request without a grammar.
        """
        if request.grammar is None or self._compiler is None:
            return True
        return self._compiler.get(self._key(request)) is not None

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Returns the error that ends a waiting request, or None if there is no error.

        There are two kinds of error: the grammar was refused, or the request's isolation domain (group of callers) has
        used up its compile time or has too many grammars in the queue.
        """
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
        """Passes the result of a compile to the compiler's cache."""
        assert self._compiler is not None
        self._compiler.absorb(compiled)

    # ---- while it runs ----------------------------------------------------------------------------------------

    def open(
        self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]
    ) -> GraftworkError | None:
        """Makes the cursor (position in the grammar) of a request that starts to run, and moves it past the tokens
        generated so far.

        The grammar must be ready. Does nothing for a request without a grammar and without a rule for its reasoning.
        Returns InvalidRequest if the grammar does not allow the generated tokens: an earlier run on another engine
        cannot have generated them.
        """
        matcher, guess = self._matchers(request)
        if matcher is None:
            return None
        cursor = GrammarCursor(
            matcher, stop_token_ids, self._eos_token_ids, max_fill_s=self._limits.fill_seconds, clock=self._clock
        )
        num_allowed = cursor.accept_all(generated)
        self._cursors[request.request_id] = cursor
        speller = None if self._compiler is None else self._compiler.speller
        drafts = self._drafts[request.request_id] = GrammarDrafts(cursor, guess, speller)
        for token_id in generated:
            drafts.follow(token_id)
        self._keys.pop(request.request_id, None)
        return None if num_allowed == len(generated) else _not_allowed(num_allowed, generated[num_allowed])

    def _matchers(self, request: EngineRequest) -> tuple[Matcher | None, Matcher | None]:
        """Returns the matcher of a request's answer, and the one from which drafts are taken; None for those it has not."""
        matcher = guess = None
        if request.grammar is not None:
            assert self._compiler is not None
            compiled = self._compiler.get(self._key(request))
            assert compiled is not None
            assert not isinstance(compiled, GraftworkError)
            matcher = compiled.held_to.matcher()
            guess = None if compiled.guessed_from is None else compiled.guessed_from.matcher()
        if (rule := request.reasoning) is None:
            return matcher, guess
        return ReasoningMatcher(rule, matcher), None if guess is None else ReasoningMatcher(rule, guess)

    def close(self, request_id: RequestId) -> None:
        """Drops the cursor (position in the grammar) of a request that no longer runs. Does nothing if there is
        none.
        """
        self._cursors.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def cursor(self, request_id: RequestId) -> GrammarCursor | None:
        """Returns the cursor (position in the grammar) of a running request. None if the request has no grammar."""
        return self._cursors.get(request_id)

    def row(
        self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int] = (), num_in_flight: int = 0
    ) -> MaskRow | None:
        """Returns a MaskRow: the tokens that the grammar allows after the answer so far and the draft tokens `drafted`.

        The grammar must allow the draft tokens. `banned` tokens are never allowed. The answer so far includes
        `num_in_flight` tokens that are not known yet: they must be accepted before the row is filled. Returns None if
        the request has no grammar.
        """
        cursor = self._cursors.get(request_id)
        return None if cursor is None else cursor.row(drafted, banned, num_in_flight)

    def constraint(self, request_id: RequestId) -> GrammarDrafts | None:
        """Returns the GrammarDrafts of a running request. This object proposes draft tokens from the request's grammar,
        and counts how many tokens of a draft from another source the grammar allows.

        Returns None if the request has no grammar.
        """
        return self._drafts.get(request_id)

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Tells the grammar which token was sampled for a running request, and moves the position in the grammar past
        this token.

        Returns an internal error if the grammar does not allow the token, because the mask should have excluded it.
        Returns None if there is no error, or if the request has no grammar.
        """
        cursor = self._cursors.get(request_id)
        if cursor is None:
            return None
        self._drafts[request_id].follow(token_id)
        if cursor.accept(token_id):
            return None
        return InternalFailure(f"Token {token_id} was chosen against the grammar of request {request_id}.")

    def close_all(self) -> None:
        """Stops the compile server, and ends the threads of the GrammarCompiler."""
        if self._compiler is not None:
            self._compiler.close()

    def check_integrity(self, running: Iterable[RequestId]) -> None:
        assert self._cursors.keys() <= set(running)
        if self._compiler is not None:
            self._compiler.check_integrity()


def _not_allowed(index: int, token_id: int) -> InvalidRequest:
    return InvalidRequest(
        f"Token {token_id} at index {index} of emitted_token_ids is not allowed by the request's grammar there. Send what "
        "the earlier run has generated, with the same grammar.",
        param="emitted_token_ids",
    )
