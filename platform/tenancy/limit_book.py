"""Reads and sets the limits of organisations, tenants, keys and end users, and finds those of a request.

Owns every change to limits. Each change adds an entry to the audit log in the same transaction. Counts nothing: quota
keepers count. A change holds for requests that begin from then on, on other gateways within a second (see
`verified_keys.py`): who has more than a new limit keeps it, and gets no more.
"""

from dataclasses import dataclass, replace
from functools import partial

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession
from graftwork.platform.errors import NotFound, NotPermitted, ValidationFailed
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, TenantId, new_id
from graftwork.platform.quotas.limits import Level, Limits, OwnerLimits, check_level, end_user_id
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy import key_rows, organisation_rows, quota_rows, repository
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tenancy.request_rows import find_status_and_limits
from graftwork.platform.tenancy.tenants import AuditEntry, TenantStatus
from graftwork.platform.tenancy.verified_keys import AccessChanges, Remembered

NO_TENANT = TenantId("")
"""The tenant of audit entries that concern an organisation."""
MAX_USER_CHARACTERS = 512
_MOST_LIMITS = 4096
"""Limits that are remembered: of the latest keys and end users."""


@dataclass(frozen=True, slots=True)
class LimitOwner:
    """Whose limits are read or set. It exists, or did when the limits were read."""

    level: Level
    owner_id: str
    tenant_id: TenantId | None = None
    """The tenant of the owner; None for an organisation."""

    @classmethod
    def organisation(cls, organisation_id: OrganisationId) -> "LimitOwner":
        return cls(Level.ORGANISATION, organisation_id)

    @classmethod
    def tenant(cls, tenant_id: TenantId) -> "LimitOwner":
        return cls(Level.TENANT, tenant_id, tenant_id)

    @classmethod
    def key(cls, tenant_id: TenantId, key_id: KeyId) -> "LimitOwner":
        return cls(Level.KEY, key_id, tenant_id)

    @classmethod
    def user(cls, tenant_id: TenantId, user: str | None) -> "LimitOwner":
        """Returns the owner of one end user's limits; None is each end user without limits of its own.

        Raises ValidationFailed for an empty or very long name.
        """
        if user is None:
            return cls(Level.USER, tenant_id, tenant_id)
        found = end_user_id(tenant_id, user)
        if found is None or len(user) > MAX_USER_CHARACTERS:
            raise ValidationFailed(f"A user has 1 to {MAX_USER_CHARACTERS} characters.", param="user")
        return cls(Level.USER, found, tenant_id)


class LimitBook:
    """The limits of all owners, in the database. Remembers those of the latest requests."""

    def __init__(self, database: Database, clock: Clock, changes: AccessChanges) -> None:
        self._database = database
        self._clock = clock
        self._changes = changes
        self._remembered = Remembered[tuple[TenantId, KeyId, EndUserId | None], Limits](clock, changes, _MOST_LIMITS)

    async def of_active(self, principal: Principal) -> Limits:
        """Returns the limits of a request that begins its work now.

        Raises NotPermitted if the tenant was suspended or deleted since the request was authenticated.
        """
        owners, state = (principal.tenant_id, principal.limits_id, principal.end_user_id), self._changes.state
        limits = self._remembered.find(owners)
        if limits is None:
            limits = await self._read(*owners)
            self._remembered.add(owners, limits, state)
        return limits

    async def _read(self, tenant_id: TenantId, key_id: KeyId, user_id: EndUserId | None) -> Limits:
        find = partial(find_status_and_limits, tenant_id=tenant_id, key_id=key_id, end_user_id=user_id)
        found = await self._database.read_few(find)
        if found is None:
            return Limits.of_tenant(tenant_id, Quota())
        status, organisation_id, quota, others = found
        if status is not TenantStatus.ACTIVE:
            raise NotPermitted("This tenant is suspended or deleted; ask the operator.", code=f"tenant_{status}")
        owners = [OwnerLimits(Level.TENANT, tenant_id, quota)]
        if organisation_id in others:
            owners.insert(0, OwnerLimits(Level.ORGANISATION, organisation_id, others[organisation_id]))
        if key_id in others:
            owners.append(OwnerLimits(Level.KEY, key_id, others[key_id]))
        of_user = None if user_id is None else others.get(user_id) or others.get(tenant_id)
        if user_id is not None and of_user is not None:
            owners.append(OwnerLimits(Level.USER, user_id, of_user))
        return Limits(tenant_id, tuple(owners), organisation_id)

    async def get(self, owner: LimitOwner) -> tuple[LimitOwner, Quota]:
        """Returns the limits of an owner, and the owner for whom they are counted (see `require_owner`). An owner without
        limits has a quota without any. Raises NotFound.
        """
        async with self._database.read() as session:
            owner = await require_owner(session, owner)
            if owner.level is Level.TENANT and owner.tenant_id is not None:
                return owner, await quota_rows.find_quota(session, owner.tenant_id)
            return owner, await quota_rows.find_owner_quota(session, owner.owner_id, owner.tenant_id)

    async def of_tenant(self, tenant_id: TenantId) -> Quota:
        """Returns the limits of a tenant, also of one that was deleted."""
        async with self._database.read() as session:
            return await quota_rows.find_quota(session, tenant_id)

    async def set(self, owner: LimitOwner, quota: Quota, *, actor: str = "admin") -> Quota:
        """Replaces all limits of an owner, and returns them.

        Raises NotFound if the owner does not exist, and ValidationFailed for a limit that its level cannot have.
        """
        check_level(owner.level, quota)
        async with self._database.write() as session:
            if owner.tenant_id is not None:
                await repository.hold_tenant(session, owner.tenant_id)
            owner = await require_owner(session, owner)
            if owner.level is Level.TENANT and owner.tenant_id is not None:
                await quota_rows.put_quota(session, owner.tenant_id, quota)
            else:
                await quota_rows.put_owner_quota(session, owner.level, owner.owner_id, owner.tenant_id, quota)
            details = {"level": str(owner.level), **quota.as_mapping()}
            tenant_id, now = owner.tenant_id or NO_TENANT, self._clock.now()
            entry = AuditEntry(new_id("aud"), now, actor, "quota.set", tenant_id, owner.owner_id, details)
            await repository.add_audit_entry(session, entry)
            await key_rows.count_access_change(session)
        self._changes.note_change()
        return quota


async def require_owner(session: ReadSession, owner: LimitOwner) -> LimitOwner:
    """Returns the owner under whose id the limits of `owner` are kept and counted: of a key that others have replaced by
    rotations, or that has replaced others, the first of them. All others count for themselves.

    Raises NotFound if the owner, or the tenant of the owner, does not exist.
    """
    if owner.tenant_id is None:
        if await organisation_rows.find_organisation(session, OrganisationId(owner.owner_id)) is None:
            raise NotFound(f"There is no organisation {owner.owner_id!r}.")
        return owner
    if await repository.find_tenant(session, owner.tenant_id) is None:
        raise NotFound(f"There is no tenant {owner.tenant_id!r}.")
    if owner.level is not Level.KEY:
        return owner
    key = await key_rows.find_key(session, owner.tenant_id, KeyId(owner.owner_id))
    if key is None:
        raise NotFound(f"There is no key {owner.owner_id!r}.")
    return replace(owner, owner_id=key.limits_id)
