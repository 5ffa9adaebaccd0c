"""The gate that session turns pass: their tenant's quota, and the counts that metrics show."""

from graftwork.engine.core.requests import KvLimits
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.quotas import QuotaKeeper, Reservation
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tenancy.tenancy import Tenancy


def kv_limits_of(quota: Quota) -> KvLimits:
    """What of a tenant's quota the engine keeps."""
    return KvLimits(quota.max_device_kv_bytes, quota.max_host_kv_bytes)


class SessionGate:
    """Implements `sessions.admission.AdmissionGate`."""

    def __init__(self, tenancy: Tenancy, quotas: QuotaKeeper, telemetry: Telemetry) -> None:
        self._tenancy = tenancy
        self._quotas = quotas
        self._telemetry = telemetry

    async def reserve(self, principal: Principal, estimated_tokens: int) -> "TurnTicket":
        """Raises LimitExceeded."""
        quota = await self._tenancy.get_quota(principal.tenant_id)
        try:
            reservation = await self._quotas.reserve(principal.tenant_id, quota, estimated_tokens)
        except LimitExceeded:
            self._telemetry.count_request(principal.tenant_id, "refused")
            raise
        return TurnTicket(reservation, self._telemetry, principal.tenant_id)

    async def kv_limits(self, principal: Principal) -> KvLimits:
        return kv_limits_of(await self._tenancy.get_quota(principal.tenant_id))

    async def max_sessions(self, principal: Principal) -> int | None:
        return (await self._tenancy.get_quota(principal.tenant_id)).max_sessions


class TurnTicket:
    """One turn's reservation."""

    def __init__(self, reservation: Reservation, telemetry: Telemetry, tenant_id: TenantId) -> None:
        self._reservation = reservation
        self._telemetry = telemetry
        self._tenant_id = tenant_id

    def rate_limit_headers(self) -> dict[str, str]:
        return self._reservation.rate_limit_headers()

    async def settle(self, actual_tokens: int) -> None:
        await self._reservation.settle(actual_tokens)

    async def refund(self) -> None:
        """The turn was never admitted; those that were are counted by the ledger."""
        self._telemetry.count_request(self._tenant_id, "failed")
        await self._reservation.refund()
