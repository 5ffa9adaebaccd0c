"""What the scheduler asks of adapters; LoraPool answers it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.step import MaskRow
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId


class AdapterResidency(Protocol):
    """Whether an adapter's weights are on the device; pins keep them there."""

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """What each waiting request needs, in their order: loads are begun, room is made and given out."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Whether a request may start with it now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Why adapters cannot serve one request together, as far as they are known by now."""
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...


class GrammarResidency(Protocol):
    """Whether a request's grammar is compiled, and where each running request stands in its own."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """All waiting requests, in their order: compiles are begun."""
        ...

    def is_ready(self, request: EngineRequest) -> bool: ...

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        """Why a request cannot have its grammar, as far as that is known by now."""
        ...

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """A request starts, or starts again behind what it has generated."""
        ...

    def close(self, request_id: RequestId) -> None: ...

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        """The mask of a request's next token, or of the one behind some drafts that its grammar allows."""
        ...

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        """A running request's next token; an error ends it."""
        ...


class NoGrammars:
    """Every request with a grammar is refused, so that the other verbs have nothing to do."""

    def want(self, requests: Sequence[EngineRequest]) -> None:
        """Nothing is begun."""

    def is_ready(self, request: EngineRequest) -> bool:
        return True

    def refusal(self, request: EngineRequest) -> GraftworkError | None:
        if request.grammar is None:
            return None
        return InvalidRequest("This engine serves no grammars.", param="grammar")

    def open(self, request: EngineRequest, stop_token_ids: Iterable[int], generated: Sequence[int]) -> None:
        """Nothing to follow."""

    def close(self, request_id: RequestId) -> None:
        """Nothing to forget."""

    def row(self, request_id: RequestId, banned: Iterable[int], drafted: Sequence[int]) -> MaskRow | None:
        return None

    def accept(self, request_id: RequestId, token_id: int) -> GraftworkError | None:
        return None
