"""Says how much of its limits an owner uses now: an organisation, a tenant, a key or an end user.

Owns nothing: sessions, adapters and the ledger each count their own. Limits per minute and concurrency are counted where
requests are admitted, and are not shown here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.platform.answers.admin import OwnerQuota, QuotaUse
from graftwork.platform.answers.usage import Money
from graftwork.platform.clock import Clock
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import month_of
from graftwork.platform.tenancy.limit_book import LimitBook, LimitOwner


@dataclass(frozen=True, slots=True)
class LimitUse:
    """Reads limits together with what is used of them."""

    limits: LimitBook
    registry: AdapterRegistry
    meter: UsageMeter
    count_sessions: Callable[[LimitOwner], Awaitable[int]]
    """Counts the open sessions of an owner."""
    clock: Clock

    async def get(self, owner: LimitOwner) -> OwnerQuota:
        """Returns the limits of an owner, and their use. Raises NotFound if the owner does not exist."""
        counted, quota = await self.limits.get(owner)
        return OwnerQuota.model_validate({**quota.as_mapping(), "used": await self._used(counted)})

    async def of_tenant(self, owner: LimitOwner) -> OwnerQuota:
        """Returns the same of a tenant that has authenticated."""
        assert owner.tenant_id is not None
        quota = await self.limits.of_tenant(owner.tenant_id)
        return OwnerQuota.model_validate({**quota.as_mapping(), "used": await self._used(owner)})

    async def _used(self, owner: LimitOwner) -> QuotaUse | None:
        if owner.level is Level.USER and owner.owner_id == owner.tenant_id:
            return None  # the limits of each end user are used by nobody in particular
        kept = await self.registry.usage_of(owner)
        spent = await self.meter.spent([owner.owner_id], month_of(self.clock.now()))
        month = spent.get(owner.owner_id, Spent())
        return QuotaUse(
            sessions=await self.count_sessions(owner),
            adapters=kept.adapters,
            adapter_bytes=kept.stored_bytes,
            monthly_tokens=month.tokens,
            monthly_costs=tuple(Money.of(atoms, currency) for currency, atoms in sorted(month.atoms.items())),
        )
