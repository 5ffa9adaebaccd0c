"""The desk of an engine that serves no grammars."""

from collections.abc import Iterable, Sequence

from graftwork.engine.batch import MaskRow
from graftwork.engine.request import EngineRequest
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId


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

    def row(self, request_id: RequestId, banned: Iterable[int]) -> MaskRow | None:
        return None

    def accept(self, request_id: RequestId, token_id: int) -> None:
        """Nothing to follow."""
