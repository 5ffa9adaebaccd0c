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
    """Provides adapters on the device. A pinned adapter is not evicted."""

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """Starts loading the adapters of all waiting requests, given by request in the order of admission."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Returns whether a request may start with this adapter now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Returns why these adapters cannot serve one request together; None if no reason is known."""
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...


class GrammarProvider(Protocol):
    """Provides compiled grammars, and tracks the position of each running request in its grammar."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Starts compiling the grammars of all waiting requests, given in the order of admission."""
        ...

    def is_ready(self, request: EngineRequest) -> bool:
        """Returns whether the request may start now: its grammar is compiled, or it has none."""
        ...

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Returns why a request cannot have its grammar; None if no reason is known."""
        ...

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Starts to track a request's position in its grammar. After a preemption, `generated` is its answer so far."""
        ...

    def close(self, request_id: RequestId) -> None:
        """Stops tracking a request's position in its grammar."""
        ...

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        """Returns the mask of the token after `drafted`; None without a grammar. The grammar must allow `drafted`."""
        ...

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Advances a running request by its next token. Returns the error that ends it, if any."""
        ...


class NoGrammars:
    """A GrammarProvider that refuses every request with a grammar."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Does nothing, because no grammar is compiled."""

    def is_ready(self, request: EngineRequest) -> bool:
        return True

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        if request.grammar is None:
            return None
        return InvalidRequest("This engine serves no grammars.", param="grammar")

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Does nothing, because no running request has a grammar."""

    def close(self, request_id: RequestId) -> None:
        """Does nothing, because no running request has a grammar."""

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        return None

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        return None
