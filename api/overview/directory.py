"""Knows the names of all tenants and adapter versions, for overviews. Reads the database at most every few seconds.

Owns a copy that may be `_FRESH_S` seconds old. Never asks the database while nobody watches.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graftwork.adapters.format.specs import OwnedVersion
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.tenants import Tenant

_log = logging.getLogger(__name__)

_FRESH_S = 5.0
MAX_NAMES = 20_000
"""The most tenants, and the most adapter versions, of an overview: the newest ones."""


@dataclass(frozen=True, slots=True)
class Names:
    """All tenants and adapter versions, as the database had them."""

    tenants: Mapping[TenantId, Tenant] = field(default_factory=dict)
    versions: Mapping[tuple[TenantId, str], OwnedVersion] = field(default_factory=dict)
    """By tenant and label, such as `name@3`."""


class OwnerDirectory:
    """Reads the names of tenants and adapter versions."""

    def __init__(self, tenancy: Tenancy, registry: AdapterRegistry, meter: ActivityMeter) -> None:
        """When a tenant turns out to be deleted, `meter` forgets it."""
        self._tenancy = tenancy
        self._registry = registry
        self._meter = meter
        self._clock = meter.clock
        self._reading = asyncio.Lock()
        self._read_at: float | None = None
        self.names = Names()
        """What was read last."""

    async def refresh(self) -> Names:
        """Returns the names, at most `_FRESH_S` seconds old; older ones while the database does not answer."""
        async with self._reading:
            now = self._clock.monotonic()
            if self._read_at is None or now - self._read_at >= _FRESH_S:
                self._read_at, began_at = now, self._clock.now()
                try:
                    tenants = await self._tenancy.all_tenants(MAX_NAMES)
                    self._forget_deleted(tenants, began_at)
                    versions = await self._registry.all_versions(MAX_NAMES)
                except Unavailable as error:
                    _log.warning("the names of tenants and adapters are old: %s", error.message)
                else:
                    self.names = Names(
                        {one.id: one for one in tenants}, {(one.tenant_id, one.label): one for one in versions}
                    )
            return self.names

    def _forget_deleted(self, tenants: Sequence[Tenant], began_at: float) -> None:
        """Makes the meter forget tenants that the database no longer has. `began_at` is when it was asked: a tenant that
        was active since then may be newer than the answer.
        """
        if len(tenants) == MAX_NAMES:
            return
        known = {one.id for one in tenants}
        for tenant_id, activity in [*self._meter.tenants.items()]:
            if tenant_id not in known and activity.active_at < began_at:
                self._meter.forget_tenant(tenant_id)
