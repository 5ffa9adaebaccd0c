"""What a request needs besides pages: its adapters and its grammar, as the scheduler asks for them.

Owns the two protocols alone. LoraPool implements AdapterProvider, the grammar manager GrammarProvider.
Invariant: a provider never waits; what is not ready is made ready in the background.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId


class AdapterProvider(Protocol):
    """Adapters on the device. A pinned adapter stays there."""

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """Start loading the adapters of all waiting requests, given by request in the order of admission."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Whether a request may start with this adapter now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Why these adapters cannot serve one request together, as far as it is known."""
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...


class GrammarProvider(Protocol):
    """Compiled grammars, and the position of each running request in its own."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Start compiling the grammars of all waiting requests, given in the order of admission."""
        ...

    def is_ready(self, request: EngineRequest) -> bool:
        """Whether the request may start now: its grammar is compiled, or it has none."""
        ...

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Why a request cannot have its grammar, as far as it is known."""
        ...

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Start to follow a request. After a preemption, `generated` is its answer so far."""
        ...

    def close(self, request_id: RequestId) -> None:
        """Stop following a request."""
        ...

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        """The mask of the token behind `drafted`, which the grammar allows; None without a grammar."""
        ...

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """Advance a running request by its next token. Returns the error that ends it, if any."""
        ...


class NoGrammars:
    """A GrammarProvider that refuses every request with a grammar."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Does nothing."""

    def is_ready(self, request: EngineRequest) -> bool:
        return True

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        if request.grammar is None:
            return None
        return InvalidRequest("This engine serves no grammars.", param="grammar")

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Does nothing."""

    def close(self, request_id: RequestId) -> None:
        """Does nothing."""

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        return None

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        return None
