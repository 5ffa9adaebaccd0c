"""Defines principals: the authenticated sender of a request (a tenant or the administrator), what the sender may do, and
which work of this process runs for whom.

Owns TenantScope, the permission to act for one tenant. Only this module makes a TenantScope, and only for an
authenticated tenant or for the administrator. So a SQL statement that requires a TenantScope never runs for anybody
else. Also owns the list of running work, which is whatever a principal has started and that goes on without asking for
its key again: an answer that is generated, or a turn of a session. Never decides who has access (`tenancy.py` does), and
never holds a secret.
Invariant: work is in the list from its start to its end, so that all of it ends when its tenant or key loses its access.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NewType

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import EndUserId, IsolationDomain, KeyId, OrganisationId, PersonId, TenantId
from graftwork.platform.keys.scopes import Scope, require_models, require_scope
from graftwork.platform.quotas.in_flight import HeldPlaces
from graftwork.platform.quotas.limits import end_user_id
from graftwork.platform.tenancy.idempotency import LineOfBatch, TurnClaim
from graftwork.platform.tenancy.request_rows import find_usable_keys
from graftwork.platform.tenancy.tenants import ApiKey, Tenant
from graftwork.platform.tracing.request_trace import NO_TRACE, RequestTrace

TenantScope = NewType("TenantScope", TenantId)
"""Permission to read and write one tenant's rows."""


SERVICE_TIERS = ("flex", "default", "priority")
"""The service tiers, lowest first. The names are those of `engine.core.requests.ServiceTier`."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request, who has authenticated with an API key of a tenant."""

    tenant_id: TenantId
    tenant_name: str
    key_id: KeyId
    weight: float
    """The tenant's weight, above 0. When the engine is full, tenants share it by their weights."""
    tier_ceiling: str
    """The highest of `SERVICE_TIERS` that this tenant's requests may ask for."""
    scopes: frozenset[str]
    adapters: frozenset[str] | None = None
    """The models that the sender's key may name, without versions and aliases; None means all."""
    turn_claim: TurnClaim | None = field(default=None, compare=False)
    """The idempotency key of the sender's request, which the turn that it starts records; None without a key."""
    place: HeldPlaces | None = field(default=None, compare=False)
    """The place that the request took before its key was looked up; None if it took none."""

    first_token_due_at: float | None = field(default=None, compare=False)
    """The time on this process's monotonic clock by which the sender wants the first token of its request; None for no
    such time.
    """
    trace: RequestTrace = field(default=NO_TRACE, compare=False, repr=False)
    """Where the times of the sender's request are noted."""
    end_user_id: EndUserId | None = field(default=None, compare=False)
    """The end user for whom the sender asks; None if the request names none."""

    person_id: PersonId | None = None
    """The person who has signed in and acts in the tenant; None for a program with a key."""
    first_key_id: KeyId | None = None
    """The first of the keys that rotations have replaced by one another up to the sender's; None if this is it."""

    @property
    def limits_id(self) -> KeyId:
        """The id under which the limits of the sender's key are kept and counted."""
        return self.first_key_id or self.key_id

    @property
    def actor(self) -> str:
        """Who acts, for the audit log: the person, or else the key."""
        return self.person_id or self.key_id

    @property
    def line(self) -> LineOfBatch | None:
        """The line of a batch whose request a turn answers; None for other work."""
        return None if self.turn_claim is None else self.turn_claim.line

    def for_user(self, user: str | None) -> "Principal":
        """Returns the same sender, who asks for the end user of this name."""
        return replace(self, end_user_id=end_user_id(self.tenant_id, user)) if user else self

    def scope(self) -> TenantScope:
        """Returns the permission to read and write this tenant's rows."""
        return TenantScope(self.tenant_id)

    def require(self, scope: Scope) -> None:
        """Raises NotPermitted if the sender's API key does not have this permission."""
        require_scope(self.scopes, scope)

    def require_models(self, models: Iterable[str], param: str | None = "model") -> None:
        """Raises NotPermitted if the sender's API key may not name one of these models. `param` names the field."""
        require_models(self.adapters, models, param)

    def capped_tier(self, asked: str) -> str:
        """Returns the service tier for a request that asks for the tier `asked`.

        The result is `asked`, or the tenant's highest tier if `asked` is above that.
        """
        return min(asked, self.tier_ceiling, key=SERVICE_TIERS.index)

    def isolation(self, pepper: bytes) -> IsolationDomain:
        """Returns the isolation domain of the sender's tenant: requests with the same domain may share cached prefixes.

        The domain is a hash of the tenant's id under `pepper`, a secret key. So nobody can compute it without the
        pepper.
        """
        return isolation_of(self.tenant_id, pepper)


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of the admin key, or a person who is an operator. Both may manage the platform, but not use inference."""

    name: str = "admin"
    """Who acts, for the audit log: the person's id, or `admin` for the admin key."""
    person_id: PersonId | None = None
    may_change: bool = True
    """Whether the operator may change anything, and not only read."""

    def require_change(self) -> None:
        """Raises NotPermitted if the operator may only read."""
        if not self.may_change:
            message = "Your role, operator-readonly, reads and changes nothing; ask an operator for the role operator."
            raise NotPermitted(message, code="read_only_role")


def principal_of(key: ApiKey, tenant: Tenant) -> Principal:
    """Returns for whom a request with this key acts. The caller has checked that the key admits it."""
    return Principal(
        tenant.id,
        tenant.name,
        key.id,
        tenant.weight,
        tenant.service_tier_ceiling,
        key.scopes,
        key.adapters,
        person_id=key.person_id,
        first_key_id=key.first_key_id,
    )


def isolation_of(tenant_id: TenantId, pepper: bytes) -> IsolationDomain:
    """Returns the isolation domain of a tenant: requests with the same domain may share cached prefixes.

    The domain is a hash of the tenant's id under `pepper`, a secret key.
    """
    return IsolationDomain(hmac.digest(pepper, b"graftwork isolation\0" + tenant_id.encode(), hashlib.sha256))


def group_of_organisation(organisation_id: OrganisationId, pepper: bytes) -> bytes:
    """Returns the name under which an engine knows the tenants of an organisation together: a digest under `pepper`."""
    return hmac.digest(pepper, b"graftwork organisation\0" + organisation_id.encode(), hashlib.sha256)


def scope_of_tenant(_admin: AdminPrincipal, tenant_id: TenantId) -> TenantScope:
    """Returns the permission to read and write one tenant's rows, for the administrator."""
    return TenantScope(tenant_id)


EndWork = Callable[[NotPermitted], None]
"""A function that cancels one piece of work. It does not wait. The error is what the client of the work gets."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    tenant_id: TenantId
    key_id: KeyId
    end: EndWork


class RunningWork:
    """The work that runs in this process, of all tenants."""

    def __init__(self) -> None:
        self._running: set[_Work] = set()

    @property
    def key_ids(self) -> frozenset[KeyId]:
        """The ids of the API keys with which the running work was started."""
        return frozenset(work.key_id for work in self._running)

    def add(self, principal: Principal, end: EndWork) -> Callable[[], None]:
        """Adds work that `principal` has started. Returns a function to call when the work has ended."""
        work = _Work(principal.tenant_id, principal.key_id, end)
        self._running.add(work)
        return lambda: self._running.discard(work)

    def end_tenant(self, tenant_id: TenantId) -> int:
        """Cancels all work of a tenant. Does not wait for its end. Returns how many pieces of work it has cancelled."""
        return self._end([work for work in self._running if work.tenant_id == tenant_id])

    def end_key(self, key_id: KeyId) -> int:
        """Cancels all work that was started with an API key, as `end_tenant` does."""
        return self._end([work for work in self._running if work.key_id == key_id])

    def _end(self, lost: list[_Work]) -> int:
        for work in lost:
            work.end(_access_ended())
        return len(lost)


_KEYS_PER_READ = 100


class AccessWatch:
    """Ends the work of this process whose key has expired, or that has lost its access by a change in another process."""

    def __init__(self, database: Database, work: RunningWork, clock: Clock) -> None:
        self._database = database
        self._work = work
        self._clock = clock

    async def check(self) -> int:
        """Asks the database which keys of running work are still usable, and cancels the other work.

        Call it every second. Returns how many pieces of work it has cancelled.
        """
        key_ids = sorted(self._work.key_ids)
        usable = set[KeyId]()
        find = partial(find_usable_keys, now=self._clock.now())
        for first in range(0, len(key_ids), _KEYS_PER_READ):
            few = key_ids[first : first + _KEYS_PER_READ]
            usable |= await self._database.read_few(partial(find, key_ids=few))
        return sum(self._work.end_key(key_id) for key_id in key_ids if key_id not in usable)


def _access_ended() -> NotPermitted:
    return NotPermitted(
        "The access of this API key has ended while the request ran: the key was revoked or has expired, its person has "
        "lost the role, or its tenant was suspended or deleted. Ask the operator.",
        code="access_ended",
    )
