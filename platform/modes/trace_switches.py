"""Keeps the tenants and sessions whose requests are traced: what an operator has switched on, for all gateways.

    set, clear ──► database ──► each gateway reads it twice a second ──► requests that begin from then on

Owns the rows, and what this process has read of them last. Never decides about a request: `TraceRules` does.
Invariant: if the database does not answer, what was read last stays in force.
"""

from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.modes import repository
from graftwork.platform.tenancy import repository as tenancy
from graftwork.platform.tenancy.tenants import AuditEntry
from graftwork.platform.tracing.trace_rules import Switches

MAX_SWITCHES = 100
"""The most tenants and sessions that are switched on at one time."""

_TENANT, _SESSION = "ten_", "ses_"


@dataclass(frozen=True, slots=True)
class TraceSwitch:
    """A tenant or a session whose requests are traced."""

    target: str
    """The id of the tenant or of the session."""
    token_ids: bool
    """Whether the token ids of its prompts and answers are logged as well."""
    changed_at: float
    """When it was switched on or changed, in unix seconds."""


class TraceSwitchboard:
    """Reads and sets the switches of all gateways that share the database."""

    def __init__(self, database: Database, clock: Clock, switches: Switches) -> None:
        """What is on stands in `switches`, which the rules of this gateway look at."""
        self._database = database
        self._clock = clock
        self._switches = switches

    async def refresh(self) -> tuple[TraceSwitch, ...]:
        """Reads the switches from the database, applies them, and returns them, the oldest first."""
        rows = await self._database.read_few(repository.list_trace_switches)
        found = tuple(TraceSwitch(*row) for row in rows)
        self._switches.traced = frozenset(one.target for one in found)
        self._switches.token_logged = frozenset(one.target for one in found if one.token_ids)
        return found

    async def set(self, target: str, *, token_ids: bool, actor: str = "admin") -> TraceSwitch:
        """Switches a tenant or a session on. The change is in the audit log. This process applies it at once.

        Raises ValidationFailed for what is no id of a tenant or session, NotFound for an unknown tenant, and Conflict
        if too many are on.
        """
        if not target.startswith((_TENANT, _SESSION)) or not target.isascii() or len(target) > 64:
            raise ValidationFailed("Give the id of a tenant (ten_…) or of a session (ses_…).", param="target")
        now = self._clock.now()
        async with self._database.write() as session:
            if target.startswith(_TENANT) and await tenancy.find_tenant(session, TenantId(target)) is None:
                raise NotFound(f"There is no tenant {target!r}.", param="target")
            others = [one for one, *_ in await repository.list_trace_switches(session) if one != target]
            if len(others) >= MAX_SWITCHES:
                raise Conflict(f"{MAX_SWITCHES} traces are on already: switch one off first.")
            await repository.put_trace_switch(session, target, token_ids=token_ids, changed_at=now)
            await tenancy.add_audit_entry(session, _entry(actor, "trace.on", target, now, {"token_ids": token_ids}))
        await self.refresh()
        return TraceSwitch(target, token_ids, now)

    async def clear(self, target: str, *, actor: str = "admin") -> None:
        """Switches a tenant or a session off. Raises NotFound if it is not on."""
        async with self._database.write() as session:
            if not await repository.delete_trace_switch(session, target):
                raise NotFound(f"Nothing is switched on for {target[:100]!r}.", param="target")
            await tenancy.add_audit_entry(session, _entry(actor, "trace.off", target, self._clock.now(), {}))
        await self.refresh()


def _entry(actor: str, action: str, target: str, at: float, details: dict[str, bool]) -> AuditEntry:
    tenant_id = TenantId(target if target.startswith(_TENANT) else "")
    return AuditEntry(new_id("aud"), at, actor, action, tenant_id, target, details)
