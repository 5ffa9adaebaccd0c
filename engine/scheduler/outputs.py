"""What the scheduler tells the client of a request."""

from dataclasses import dataclass

from graftwork.engine.core.events import EngineEvent, RequestFinished
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


@dataclass(frozen=True, slots=True)
class Output:
    """One event of a request, or the error that ended it."""

    request_id: RequestId
    event: EngineEvent | GraftworkError

    @property
    def is_last(self) -> bool:
        return isinstance(self.event, RequestFinished | GraftworkError)
