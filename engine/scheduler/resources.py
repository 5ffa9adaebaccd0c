"""Defines how the scheduler asks for what a request needs besides pages: adapters and a grammar.

Owns only the two protocols. LoraPool implements AdapterProvider, and the grammar manager implements GrammarProvider.
Invariant: no method waits. Adapters are loaded and grammars are compiled in the background.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId


class AdapterProvider(Protocol):
    """Loads adapters to the device and tells which are ready. A pinned adapter is not evicted."""

    def want(self, groups: list[tuple[str, ...]], *, may_place: bool) -> bool:
        """Starts to load the adapters that waiting requests need.

        `groups` has one tuple of adapter digests for each request, in the order in which the requests are admitted.

        `may_place` says whether adapters may be copied to the device now, for which others and KV pages may be moved.
        If it is False, returns whether a copy should be tried as soon as it may. Else returns False.
        """
        ...

    def take_placed(self) -> list[tuple[str, int]]:
        """Returns the digests and the bytes of the adapters that `want` has copied to the device, or has begun to copy, each
        once.
        """
        ...

    def is_ready(self, digest: str) -> bool:
        """Returns whether the adapter with this digest is on the device, so that a request may use it now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Returns the error if a request cannot use these adapters together; None if it can, or if that is not known
        yet.
        """
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...

    def take_loaded_bytes(self, digest: str) -> int:
        """Returns the adapter's bytes if it was loaded to the device since the last call for it, else 0."""
        ...


class GrammarProvider(Protocol):
    """Compiles grammars, and tracks how far the answer of each running request has come in its grammar."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Starts to compile the grammars of waiting requests. `requests` are in the order in which they are admitted."""
        ...

    def is_ready(self, request: EngineRequest) -> bool:
        """Returns whether the grammar of `request` is compiled. Returns True for a request without a grammar."""
        ...

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Returns the error if the grammar of `request` cannot be used; None if it can, or if that is not known yet."""
        ...

    def open(
        self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]
    ) -> GraftworkError | None:
        """Starts to track how far a request's answer has come in its grammar.

        `generated` are the answer's tokens so far. A new request has none, unless it had an earlier run. Returns an
        error, which ends the request, if the grammar does not allow these tokens; otherwise None.
        """
        ...

    def close(self, request_id: RequestId) -> None:
        """Stops tracking how far the answer of a request has come in its grammar."""
        ...

    def row(
        self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int], num_in_flight: int
    ) -> MaskRow | None:
        """Returns which tokens may follow the request's answer and the draft tokens `drafted`.

        The grammar must allow `drafted`. The result never allows `banned` tokens. None for a request without a grammar.
        `num_in_flight` more tokens must be accepted before the result is filled.
        """
        ...

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Records that `token_id` was chosen as the next token of a request's answer.

        Returns an error, which ends the request, if the grammar does not allow this token; otherwise None.
        """
        ...


class NoGrammars:
    """A GrammarProvider for an engine without grammars. It refuses every request that needs one."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Does nothing, because no grammar is compiled."""

    def is_ready(self, request: EngineRequest) -> bool:
        return True

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        if request.grammar is None and request.reasoning is None:
            return None
        return InvalidRequest("This engine serves no grammars and no budgets of reasoning.", param="grammar")

    def open(
        self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]
    ) -> GraftworkError | None:
        return None

    def close(self, request_id: RequestId) -> None:
        """Does nothing, because no running request has a grammar."""

    def row(
        self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int], num_in_flight: int
    ) -> MaskRow | None:
        return None

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        return None
