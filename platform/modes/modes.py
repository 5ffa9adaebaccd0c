"""Keeps the degraded modes: what an operator takes away from all requests while the server has too much to do.

    set ──► database ──► each gateway reads it twice a second ──► requests that begin from then on

Owns the modes that this process applies now. Never applies them to a request: `Generator.degraded` does.
Invariant: if the database does not answer, the modes that were read last stay in force.
"""

from dataclasses import asdict, dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable, ValidationFailed
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.modes import repository
from graftwork.platform.tenancy import repository as tenancy
from graftwork.platform.tenancy.tenants import AuditEntry

REFRESH_S = 0.5
"""Seconds between two reads of the modes."""
_FLEX_RETRY_S = 60.0
_NO_TENANT = TenantId("")


@dataclass(frozen=True, slots=True)
class DegradedModes:
    """What requests must do without. The default takes nothing away."""

    max_output_tokens: int | None = None
    """The most tokens of one answer, at least 1, whatever the request allows; None sets no limit."""
    suspend_drafts: bool = False
    """Whether answers are generated without lookup drafts, which cost computation when they are wrong."""
    refuse_flex: bool = False
    """Whether requests of the tier `flex` are refused."""
    changed_at: float | None = None
    """The time of the last change in unix seconds; None if there was none."""

    def in_force(self) -> list[str]:
        """Returns what is taken away, such as `max_output_tokens=256` and `refuse_flex`; an empty list if nothing is."""
        cap = [] if self.max_output_tokens is None else [f"max_output_tokens={self.max_output_tokens}"]
        return cap + [name for name in ("suspend_drafts", "refuse_flex") if getattr(self, name)]

    def check_tier(self, tier: str) -> None:
        """Raises Unavailable if requests of this service tier are refused."""
        if self.refuse_flex and tier == "flex":
            raise Unavailable(
                "The operator has switched the service tier flex off while the server has too much to do. Send the "
                "request again later, or with another service_tier.",
                code="tier_suspended",
                retry_after_s=_FLEX_RETRY_S,
            )


class ModeSwitch:
    """Reads and sets the degraded modes of all gateways that share the database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.current = DegradedModes()
        """The modes that this process applies."""

    async def refresh(self) -> DegradedModes:
        """Reads the modes from the database, applies them, and returns them."""
        found = await self._database.read_few(repository.find_modes)
        if found is not None:
            self.current = DegradedModes(*found)
        return self.current

    async def set(self, modes: DegradedModes, *, actor: str = "admin") -> DegradedModes:
        """Replaces all modes, and returns them. The change is in the audit log. This process applies them at once.

        Raises ValidationFailed if `max_output_tokens` is below 1. The time of `modes` is ignored.
        """
        limit, now = modes.max_output_tokens, self._clock.now()
        if limit is not None and limit < 1:
            raise ValidationFailed("max_output_tokens must be at least 1, or null.", param="max_output_tokens")
        fields = {**asdict(modes), "changed_at": now}
        details = {name: value for name, value in fields.items() if name != "changed_at"}
        async with self._database.write() as session:
            await repository.put_modes(session, **fields)
            entry = AuditEntry(new_id("aud"), now, actor, "modes.set", _NO_TENANT, "modes", details)
            await tenancy.add_audit_entry(session, entry)
        self.current = DegradedModes(**fields)
        return self.current
