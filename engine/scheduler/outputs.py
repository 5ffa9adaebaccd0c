"""What the scheduler says: to each request, and of itself."""

from dataclasses import dataclass

from graftwork.engine.core.events import EngineEvent, RequestFinished
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


@dataclass(frozen=True, slots=True)
class Output:
    """What one request is to be told: an event, or the error that ended it."""

    request_id: RequestId
    event: EngineEvent | GraftworkError

    @property
    def is_last(self) -> bool:
        return isinstance(self.event, RequestFinished | GraftworkError)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    """Of the cached ones, those that were loaded from the host."""
    disk_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    max_adapters_in_a_step: int = 0
