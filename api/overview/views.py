"""Defines what a watcher asks of an overview (a view), remembers the queries that asked for it, and orders the rows.

A view is hashable, so watchers who ask the same share one encoded answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from graftwork.platform.activity.meter import Activity, ActivityMeter
from graftwork.platform.ids import TenantId

DEFAULT_ROWS = 50
MAX_ROWS = 200
_MAX_QUERIES = 1024
_MAX_QUERY_BYTES = 512


class Sort(StrEnum):
    """The orders of the tenants. All but `name` begin with the largest."""

    ACTIVITY = "activity"
    RUNNING = "running"
    WAITING = "waiting"
    REQUESTS = "requests"
    TOKENS = "tokens"
    TTFT = "ttft"
    INTER_TOKEN = "inter_token"
    REFUSALS = "refusals"
    BURN = "burn"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class View:
    """What one watcher asks for."""

    tenant_id: TenantId | None = None
    """The tenant whose rows are shown; None shows all."""
    is_operator: bool = True
    """Whether engines and the shares of other tenants are shown."""
    sort: Sort = Sort.ACTIVITY
    rows: int = DEFAULT_ROWS
    """The most rows of each list."""
    tenants: int = 0
    """How many rows of the list of tenants are left out at its beginning."""
    adapters: int = 0
    sessions: int = 0
    find: str = ""
    """Only rows whose name or id has this text, in lower case; empty shows all."""

    def finds(self, *texts: str | None) -> bool:
        """Returns whether one of the texts has what the watcher looks for."""
        return not self.find or any(self.find in text.lower() for text in texts if text)


class KnownQueries:
    """Maps query strings to the views that they ask for, so that a watcher that asks again costs no validation.

    Holds 1,024 at most; the oldest go first. Knows only queries that were valid.
    """

    def __init__(self) -> None:
        self._views: dict[tuple[TenantId | None, bytes], View] = {}

    def get(self, tenant_id: TenantId | None, query: bytes) -> View | None:
        """Returns the view that a tenant, or the operator (None), asks for with these bytes. None for a new query."""
        return self._views.get((tenant_id, query))

    def add(self, tenant_id: TenantId | None, query: bytes, view: View) -> None:
        """Remembers what a valid query asks for."""
        if len(query) <= _MAX_QUERY_BYTES:
            self._views[tenant_id, query] = view
        if len(self._views) > _MAX_QUERIES:
            del self._views[next(iter(self._views))]


Key = Callable[[Activity], float]


def order_of(sort: Sort, meter: ActivityMeter) -> Key:
    """Returns the function by whose values tenants and adapters are sorted, the largest first."""
    now = meter.clock.monotonic()

    def activity(one: Activity) -> float:
        return 1000.0 * (one.running + one.waiting) + one.per_second("requests", now) + one.per_second("refused", now)

    keys: Mapping[Sort, Key] = {
        Sort.RUNNING: lambda one: one.running,
        Sort.WAITING: lambda one: one.waiting,
        Sort.REQUESTS: lambda one: one.per_second("requests", now),
        Sort.TOKENS: lambda one: one.per_second("prompt", now) + one.per_second("generated", now),
        Sort.TTFT: lambda one: one.first_token_s(0.99) or 0.0,
        Sort.INTER_TOKEN: lambda one: one.between_tokens_s(0.99) or 0.0,
        Sort.REFUSALS: lambda one: one.counts.totals["refused"],
        Sort.BURN: lambda one: meter.burn_rate(one) or 0.0,
    }
    return keys.get(sort, activity)
