"""Defines usage records: what one request used, how it ended, and the sums of many."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, RequestId, SessionId, TenantId
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import NO_COST, NO_USE, Cost, Quantities


class UsageOutcome(StrEnum):
    """How a request ended, as its usage record says."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client left or cancelled the request, or the tenant or key lost its access. Generated tokens are billed."""
    FAILED = "failed"
    """The request itself was at fault. Generated tokens are billed."""
    SERVER_ERROR = "server_error"
    """The server was at fault. Nothing is billed: the record has no tokens."""
    INTERRUPTED = "interrupted"
    """The gateway died. Of a turn, the tokens of the stored events are billed; of other requests, those in the journal."""

    @property
    def is_billed(self) -> bool:
        return self is not UsageOutcome.SERVER_ERROR

    @classmethod
    def of_error(cls, error: GraftworkError) -> "UsageOutcome":
        """Returns the outcome of a request that ended with `error`."""
        return cls.SERVER_ERROR if error.is_server_fault else cls.FAILED


class UsageGroup(StrEnum):
    """The ways in which usage records can be grouped before they are added up."""

    DAY = "day"
    """Groups by calendar day in UTC, as `2026-11-20`."""
    ADAPTER = "adapter"
    """Groups by adapter version, as `name@version`. The group None is the base model."""
    SESSION = "session"
    """Groups by session id. The group None is all requests without a session."""
    KEY = "key"
    TENANT = "tenant"
    TIER = "tier"
    """Groups by service tier."""
    PRICE = "price"
    """Groups by price list. The group None is all requests without a price."""
    ORGANISATION = "organisation"
    """Groups by the organisation that the tenant belonged to when the request began. None is all others' requests."""
    USER = "user"
    """Groups by end user, as a digest. The group None is all requests that named no end user."""
    BATCH = "batch"
    """Groups by batch. The group None is all requests outside batches."""
    MODEL = "model"
    """Groups by the model's name as the callers wrote it, such as `agent@prod`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine did for one request, or for several together, besides what has a price."""

    drafted_tokens: int = 0
    """Draft tokens that the model verified."""
    forced_tokens: int = 0
    """Accepted draft tokens that a grammar dictated."""
    reasoning_tokens: int = 0
    """Tokens of the answer that are the model's reasoning."""
    engine_us: int = 0
    """The request's share of the time of the engine's steps, in microseconds."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))


NO_WORK = Work()


UsageKey = tuple[TenantId, RequestId]
"""What tells usage records apart."""


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """A usage record: the token counts of one request, and who sent it for which model."""

    request_id: RequestId
    tenant_id: TenantId
    key_id: KeyId
    model: str
    """The `model` of the request, as the caller named it."""
    adapter: str | None
    """`name@version`; None for the base model."""
    session_id: SessionId | None
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was found in the cache."""
    completion_tokens: int
    at: float
    outcome: UsageOutcome = UsageOutcome.COMPLETED
    host_tokens: int = 0
    """The part of `cached_tokens` that was in host memory; the next field: on disk. The rest was on the device."""
    disk_tokens: int = 0
    kv_byte_seconds: int = 0
    """Bytes of KV that the request held on the device, times the seconds for which it held them."""
    adapter_bytes: int = 0
    """Bytes of adapters that were loaded to the device for the request."""
    drafted_tokens: int = 0
    """This and the next three are the fields of `Work`."""
    forced_tokens: int = 0
    reasoning_tokens: int = 0
    engine_us: int = 0
    service_tier: str | None = None
    """The tier that served the request; None for a row of an older version."""
    price_id: str | None = None
    """The price list of the request; None if it has no price."""
    cost: Cost = NO_COST
    currency: str | None = None
    """The currency of the price list; None if the request has no price."""
    organisation_id: OrganisationId | None = None
    """The organisation that the tenant belonged to when the request began."""
    end_user_id: EndUserId | None = None
    """The end user that the request named, as a digest."""
    batch_id: str | None = None
    """The batch that the request belongs to."""
    unbilled_prompt_tokens: int = 0
    """This and the next: tokens that the engine has reported for the request, and that are not in the figures above."""
    unbilled_completion_tokens: int = 0
    first_key_id: KeyId | None = None
    """The key in whose limits the request counts, if it is another than `key_id`: one that rotations have replaced by it."""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "UsageEvent":
        return cls(**{**fields, "outcome": UsageOutcome(fields["outcome"]), "cost": Cost(**fields["cost"])})

    @property
    def key(self) -> UsageKey:
        return self.tenant_id, self.request_id

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def quantities(self) -> Quantities:
        """What the request used, as far as it can have a price."""
        return Quantities(
            uncached_tokens=self.prompt_tokens - self.cached_tokens,
            device_tokens=self.cached_tokens - self.host_tokens - self.disk_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            output_tokens=self.completion_tokens,
            kv_byte_seconds=self.kv_byte_seconds,
            adapter_bytes=self.adapter_bytes,
        )

    def priced(self, prices: PriceList | None) -> "UsageEvent":
        """Returns the record with a price list, and with the cost of what the request used so far."""
        if prices is None:
            return self
        cost = prices.rates.cost(self.quantities)
        return replace(self, price_id=prices.price_id, cost=cost, currency=prices.currency)

    @property
    def day(self) -> str:
        """The calendar day of the request in UTC, as `2026-11-20`."""
        return datetime.fromtimestamp(self.at, UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """The total usage of one group of requests, such as the requests of one day."""

    group: str | None
    requests: int = 0
    used: Quantities = NO_USE
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """The sum of the costs by currency. Requests without a price are not in it."""
    work: Work = NO_WORK

    @property
    def prompt_tokens(self) -> int:
        return self.used.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.used.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return self.used.output_tokens

    def __add__(self, other: "UsageSummary") -> "UsageSummary":
        costs = dict(self.costs)
        for currency, cost in other.costs.items():
            costs[currency] = costs.get(currency, NO_COST) + cost
        num_requests = self.requests + other.requests
        return UsageSummary(self.group, num_requests, self.used + other.used, costs, self.work + other.work)
