"""Accounts for the tokens of a request: the quota reservation, the usage row and the metrics.

Owns the order of the steps: reserve quota, record the usage, settle the reservation.
Never generates anything, and never computes a price.
Invariant: the usage row is written before the reservation is settled, so no token is missing from both.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.engine.core.requests import KvLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, LimitExceeded
from graftwork.platform.ids import RequestId, SessionId, TenantId
from graftwork.platform.quotas.in_flight import HeldPlaces, InFlightBound
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.quotas import QuotaKeeper, Reservation
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.metering import UsageBacklog, UsageEvent
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.views import usage_body


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens of one request: device + host + disk = cached, and cached + recomputed = prompt."""

    cache: CacheReport
    completion_tokens: int
    drafts: DraftReport

    @property
    def prompt_tokens(self) -> int:
        return self.cache.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.cache.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.cache.prompt_tokens + self.completion_tokens

    @property
    def prompt_tokens_by_tier(self) -> dict[str, int]:
        """The prompt's tokens by the cache tier that had their KV, under the names that the metrics use."""
        return {
            "device": self.cache.device_tokens,
            "host": self.cache.host_tokens,
            "disk": self.cache.disk_tokens,
            "recomputed": self.cache.recomputed_tokens,
        }

    def as_body(self) -> dict[str, Any]:
        """Returns the `usage` object of an answer."""
        return usage_body(self.cache, self.completion_tokens, self.drafts)


@dataclass(frozen=True, slots=True)
class Charge:
    """The fields of a usage row except for the token counts: the request, its principal, its model and its session."""

    request_id: RequestId
    principal: Principal
    model: ResolvedModel
    session_id: SessionId | None = None
    """The session that is charged; None for a request outside sessions."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Opens an account for each request of a gateway, and reserves the tenant's quota for it."""

    quota_of: Callable[[TenantId], Awaitable[Quota]]
    quotas: QuotaKeeper
    backlog: UsageBacklog
    telemetry: Telemetry
    clock: Clock
    in_flight: InFlightBound

    def take_places(self, tenant_id: TenantId, answers: int = 1) -> HeldPlaces:
        """Takes a place for each answer of a request. Call it before any other work for the request.

        Raises CapacityContended if the engine has no room for so many answers of the tenant, and InvalidRequest if it
        never has.
        """
        try:
            return self.in_flight.take(tenant_id, answers)
        except CapacityContended:
            self.telemetry.count_request(tenant_id, "refused")
            raise

    async def open(self, charge: Charge, quota: Quota, estimated_tokens: int, answers: int = 1) -> "RequestAccount":
        """Reserves the estimated tokens, and a place for each answer, in the tenant's quota. Raises LimitExceeded.

        Raises Unavailable while usage rows cannot be stored, so that no more work starts that nobody can charge.
        """
        self.backlog.check()
        tenant_id = charge.principal.tenant_id
        try:
            reservation = await self.quotas.reserve(tenant_id, quota, estimated_tokens, answers)
        except LimitExceeded:
            self.telemetry.count_request(tenant_id, "refused")
            raise
        return RequestAccount(self, charge, reservation)


class RequestAccount:
    """Records and charges the usage of one request. Settle a request once, by `close` or by `settle`.

    In all methods, `usage` is None if the engine admitted no prompt. `outcome` is `completed`, `failed` or `cancelled`.
    """

    def __init__(self, accounting: Accounting, charge: Charge, reservation: Reservation) -> None:
        self.reservation = reservation
        self._accounting = accounting
        self._charge = charge
        self._is_recorded = False

    def row(self, usage: Usage | None, outcome: str) -> UsageEvent | None:
        """Returns the usage row, for a caller that stores it in its own transaction and then calls `count`."""
        if usage is None:
            return None
        charge = self._charge
        return UsageEvent(
            request_id=charge.request_id,
            tenant_id=charge.principal.tenant_id,
            key_id=charge.principal.key_id,
            model=charge.model.requested,
            adapter=charge.model.adapter_label,
            session_id=charge.session_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            at=self._accounting.clock.now(),
            outcome=outcome,
        )

    def count(self, usage: Usage | None, outcome: str) -> None:
        """Counts the usage in the metrics. Call it once the usage row is stored."""
        self._is_recorded = True
        if usage is not None:
            telemetry, tenant_id = self._accounting.telemetry, self._charge.principal.tenant_id
            telemetry.count_tokens(tenant_id, usage.prompt_tokens_by_tier, usage.completion_tokens)
            telemetry.count_request(tenant_id, outcome)

    async def record(self, usage: Usage | None, outcome: str) -> None:
        """Writes the usage row, and adds the usage to the metrics. A second call for the same request changes nothing.

        If the database does not answer, the row is stored later.
        """
        row = self.row(usage, outcome)
        if row is not None and not self._is_recorded:
            await self._accounting.backlog.record(row, lambda: self.count(usage, outcome))

    async def close(self, usage: Usage | None, outcome: str) -> None:
        """Records the usage if it is not recorded, then settles the reservation."""
        try:
            await self.record(usage, outcome)
        finally:
            await self.settle(usage, outcome)

    async def settle(self, usage: Usage | None, outcome: str) -> None:
        """Charges the quota for the used tokens, or refunds the reservation if no token was used."""
        if usage is not None:
            await self.reservation.settle(usage.total_tokens)
            return
        self._accounting.telemetry.count_request(self._charge.principal.tenant_id, outcome)
        await self.reservation.refund()


def kv_limits(quota: Quota) -> KvLimits:
    """Returns the limits of a tenant's KV memory in bytes, on the device and on the host. The engine enforces them."""
    return KvLimits(quota.max_device_kv_bytes, quota.max_host_kv_bytes)
