"""Manages tenants and their API keys, and finds the tenant that an API key belongs to.

Owns every change to tenants and keys. Limits and organisations are in `limit_book.py` and `organisations.py`. Each change adds an entry to the audit log in the same transaction. A
tenant's key may use the tenant routes, and the admin key may use the admin routes. A wrong key is refused with 401, and
a key of the wrong kind with 403. The secret of a key appears only in the answer that made the secret, and is never
logged.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import Conflict, NotAuthenticated, NotFound, NotPermitted, ValidationFailed
from graftwork.platform.ids import KeyId, OrganisationId, TenantId, new_id
from graftwork.platform.keys.console_tickets import ConsoleTicket, parse_ticket, ticket_of_key
from graftwork.platform.keys.keys import KeyKind, KeyParts, key_digest, parse_key
from graftwork.platform.keys.networks import require_network
from graftwork.platform.pagination import FIRST_PAGE, Page, PageRequest
from graftwork.platform.tenancy import key_rows, repository
from graftwork.platform.tenancy.key_holders import KeyHolders, KeyUses
from graftwork.platform.tenancy.limit_book import LimitBook
from graftwork.platform.tenancy.new_keys import NewKey, audit_details, check_name, end_of_rotated, successor_of
from graftwork.platform.tenancy.organisations import Organisations, hold_organisation
from graftwork.platform.tenancy.principals import SERVICE_TIERS, Principal, RunningWork, principal_of
from graftwork.platform.tenancy.tenants import ApiKey, AuditEntry, Tenant, TenantStatus
from graftwork.platform.tenancy.verified_keys import MOST_KEYS, AccessChanges, Holder, VerifiedKey, VerifiedKeys


class Tenancy:
    """Reads and changes tenants and API keys.

    Every change is written to the audit log. `actor` is the name of the administrator in that log entry.
    """

    def __init__(self, database: Database, pepper: bytes, clock: Clock, work: RunningWork | None = None) -> None:
        """`work` is what runs in this process. It is cancelled when its tenant or key loses its access."""
        self._database = database
        self._pepper = pepper
        self._clock = clock
        self.work = work or RunningWork()
        self._holders = KeyHolders(database, pepper)
        self.changes = AccessChanges(clock, lambda: database.read_few(key_rows.find_access_changes))
        self._verified = VerifiedKeys(clock, self.changes, MOST_KEYS)
        self.uses = KeyUses(database)
        self.limits = LimitBook(database, clock, self.changes)
        self.organisations = Organisations(database, clock, self.changes)

    # Tenants

    async def create_tenant(
        self,
        name: str,
        *,
        weight: float = 1.0,
        service_tier_ceiling: str = "default",
        organisation_id: OrganisationId | None = None,
        actor: str = "admin",
    ) -> Tenant:
        """Creates a tenant, which has no API keys yet, and returns it.

        Raises ValidationFailed if a value is not allowed, and NotFound if the organisation does not exist.
        """
        _check_tenant(name, weight, service_tier_ceiling)
        now = self._clock.now()
        tenant = Tenant(
            TenantId(new_id("ten")),
            name,
            TenantStatus.ACTIVE,
            float(weight),
            service_tier_ceiling,
            created_at=now,
            organisation_id=organisation_id,
        )
        async with self._database.write() as session:
            if organisation_id is not None:
                await hold_organisation(session, organisation_id)
            await repository.add_tenant(session, tenant)
            details = {"name": name, "weight": weight, "service_tier_ceiling": service_tier_ceiling}
            if organisation_id is not None:
                details["organisation_id"] = organisation_id
            await self._audit(session, actor, "tenant.created", tenant.id, tenant.id, details)
        return tenant

    async def list_tenants(
        self, page: PageRequest = FIRST_PAGE, organisation_id: OrganisationId | None = None
    ) -> Page[Tenant]:
        """Returns one page of the tenants of an organisation, or of all tenants for None."""
        async with self._database.read() as session:
            return await repository.list_tenants(session, page, organisation_id)

    async def all_tenants(self, limit: int) -> Sequence[Tenant]:
        """Returns the `limit` newest tenants, the newest first."""
        async with self._database.read() as session:
            return await repository.newest_tenants(session, limit)

    async def get_tenant(self, tenant_id: TenantId) -> Tenant:
        """Returns the tenant. Raises NotFound if it is unknown or was deleted."""
        async with self._database.read() as session:
            return await _tenant(session, tenant_id)

    async def update_tenant(
        self,
        tenant_id: TenantId,
        *,
        name: str | None = None,
        weight: float | None = None,
        service_tier_ceiling: str | None = None,
        actor: str = "admin",
    ) -> Tenant:
        """Changes those fields of a tenant that are not None, and returns the tenant.

        Raises NotFound if the tenant does not exist, and ValidationFailed if a value is not allowed.
        """
        given = {"name": name, "weight": weight, "service_tier_ceiling": service_tier_ceiling}
        changes = {field: value for field, value in given.items() if value is not None}
        return await self._change_tenant(tenant_id, changes, "tenant.updated", actor)

    async def suspend_tenant(self, tenant_id: TenantId, *, actor: str = "admin") -> Tenant:
        """Suspends a tenant: cancels its running requests, and until `resume_tenant` refuses new ones with 403.

        Raises NotFound if the tenant does not exist.
        """
        tenant = await self._change_tenant(tenant_id, {"status": TenantStatus.SUSPENDED}, "tenant.suspended", actor)
        self.work.end_tenant(tenant_id)
        return tenant

    async def resume_tenant(self, tenant_id: TenantId, *, actor: str = "admin") -> Tenant:
        """Ends the suspension of a tenant. Raises NotFound if the tenant does not exist."""
        return await self._change_tenant(tenant_id, {"status": TenantStatus.ACTIVE}, "tenant.resumed", actor)

    async def delete_tenant(self, tenant_id: TenantId, *, actor: str = "admin") -> None:
        """Deletes a tenant with its API keys and limits, and cancels its running requests. `erasure.py` erases the rest.

        Raises NotFound if the tenant does not exist.
        """
        async with self._database.write() as session:
            await _hold_tenant(session, tenant_id)
            deleted = {"status": str(TenantStatus.DELETED), "deleted_at": self._clock.now()}
            await repository.change_tenant(session, tenant_id, deleted)
            await repository.delete_belongings(session, tenant_id)
            await self._audit(session, actor, "tenant.deleted", tenant_id, tenant_id, {})
            await key_rows.count_access_change(session)
        self.changes.note_change()
        self.work.end_tenant(tenant_id)

    # Keys

    async def create_key(
        self,
        tenant_id: TenantId,
        name: str,
        *,
        scopes: Collection[str] | None = None,
        adapters: Collection[str] | None = None,
        allowed_ips: Collection[str] | None = None,
        expires_at: float | None = None,
        actor: str = "admin",
    ) -> tuple[ApiKey, str]:
        """Makes an API key for a tenant. Returns the stored key and its plaintext, which the server cannot show again.

        See `NewKey` for the arguments. Raises NotFound if the tenant does not exist, and ValidationFailed if a value is
        not allowed.
        """
        new = NewKey(name, scopes, adapters, allowed_ips, expires_at)
        key, plaintext = new.make(tenant_id, self._clock.now(), self._pepper)
        async with self._database.write() as session:
            await _hold_tenant(session, tenant_id)
            await key_rows.add_key(session, key)
            await self._audit(session, actor, "key.created", tenant_id, key.id, audit_details(key))
        return key, plaintext

    async def list_keys(self, tenant_id: TenantId, page: PageRequest = FIRST_PAGE) -> Page[ApiKey]:
        """Returns one page of the tenant's API keys, including revoked keys. Raises NotFound if the tenant does not
        exist.
        """
        async with self._database.read() as session:
            await _tenant(session, tenant_id)
            return await key_rows.list_keys(session, tenant_id, page)

    async def rotate_key(
        self,
        tenant_id: TenantId,
        key_id: KeyId,
        *,
        overlap_s: float = 0.0,
        expires_at: float | None = None,
        actor: str = "admin",
    ) -> tuple[ApiKey, str]:
        """Makes a new API key that allows the same as an old one, and counts in the same limits. Returns the new key and
        its plaintext.

        The old key ends after `overlap_s` seconds, or at its own end if that is earlier. The new key ends at
        `expires_at`, in unix seconds; None means at the end that the old key had. Work that was started with the old
        key is cancelled when that key ends.

        Raises NotFound if the tenant or the key does not exist, ValidationFailed if a value is not allowed, and
        Conflict if the key was revoked, has expired, was rotated before, or is that of a person.
        """
        now = self._clock.now()
        async with self._database.write() as session:
            old = await _hold_key(session, tenant_id, key_id)
            _refuse_seat(old)
            ends_at = end_of_rotated(old, overlap_s, now)
            key, plaintext = successor_of(old, expires_at, now).make(tenant_id, now, self._pepper, old.limits_id)
            await key_rows.add_key(session, key)
            await key_rows.change_key(session, tenant_id, key_id, {"expires_at": ends_at, "replaced_by": key.id})
            details = {"replaced_by": key.id, "ends_at": ends_at, "expires_at": key.expires_at}
            await self._audit(session, actor, "key.rotated", tenant_id, key_id, details)
            await key_rows.count_access_change(session)
        self.changes.note_change()
        if ends_at <= now:
            self.work.end_key(key_id)
        return key, plaintext

    async def revoke_key(self, tenant_id: TenantId, key_id: KeyId, *, actor: str = "admin") -> ApiKey:
        """Revokes an API key for ever, cancels the requests that it has started, and returns it.

        If the key was revoked before, changes nothing.

        Raises NotFound if the tenant or the key does not exist, and Conflict for the key of a person.
        """
        async with self._database.write() as session:
            key = await _hold_key(session, tenant_id, key_id)
            _refuse_seat(key)
            if key.revoked_at is not None:
                return key
            revoked = replace(key, revoked_at=self._clock.now())
            await key_rows.change_key(session, tenant_id, key_id, {"revoked_at": revoked.revoked_at})
            await self._audit(session, actor, "key.revoked", tenant_id, key_id, {})
            await key_rows.count_access_change(session)
        self.changes.note_change()
        self.work.end_key(key_id)
        return revoked

    async def authenticate(self, token: str, address: str = "") -> Principal:
        """Returns the principal (the authenticated sender) to whom a tenant's API key belongs.

        `token` is the key, or a ticket of the console for the key; `address` is the IP address of its sender. Sees
        every change that this process has made before the call, and those of others after a second at most (see
        `verified_keys.py`). Calls at the same time share their reads of the database (see `key_holders.py`).

        Raises NotAuthenticated if the key is wrong, revoked or expired, or the ticket has ended, and NotPermitted if the
        tenant is suspended or the key does not allow the address.
        """
        key, tenant = await self._holder(token)
        self._check(key, tenant, address)
        return principal_of(key, tenant)

    def still_admits(self, principal: Principal, digest: bytes, address: str) -> bool:
        """Returns whether the key of this digest, which has authenticated `principal`, still gives it the same rights.

        Reads no database, and returns False where that is needed to know.
        """
        known = self._verified.find(digest)
        if known is None or known.until is not None:
            return False
        key, tenant = known.holder
        try:
            self._check(key, tenant, address)
        except (NotAuthenticated, NotPermitted):
            return False
        return key.id == principal.key_id and key.scopes == principal.scopes

    def _check(self, key: ApiKey, tenant: Tenant, address: str) -> None:
        """Raises an error if the key does not admit a request from `address` now. Notes its use."""
        now = self._clock.now()
        if key.revoked_at is not None and key.person_id is not None:
            raise NotAuthenticated(
                "Your sign-in has ended: your role in this tenant was taken back.", code="access_ended"
            )
        if key.revoked_at is not None:
            raise NotAuthenticated("This API key was revoked; use another one.")
        if key.is_expired(now):
            raise NotAuthenticated("This API key has expired; use another one.", code="expired_api_key")
        require_network(key.allowed_ips, address)
        if tenant.status is not TenantStatus.ACTIVE:
            raise NotPermitted("This tenant is suspended; ask the operator.", code="tenant_suspended")
        self.uses.note(key, now)

    async def _holder(self, token: str) -> Holder:
        """Returns the key with this text, or the key of this ticket, and its tenant. It may be revoked or expired.

        Raises NotAuthenticated if there is none, or if the ticket has ended.
        """
        digest, now = key_digest(token), self._clock.now()
        known = self._verified.find(digest)
        if known is not None and (known.until is None or now < known.until):
            return known.holder
        parts = parse_key(token) or parse_ticket(token)
        if parts is None or parts.kind is not KeyKind.TENANT:
            raise _wrong_key()
        until = None
        if isinstance(parts, ConsoleTicket):
            parts.check_time(now)
            until = float(parts.until)
        state = self.changes.state
        holder = await self._holders.find(parts)
        if holder is None:
            raise _wrong_key()
        self._verified.add(digest, VerifiedKey(holder, until), state)
        return holder

    async def ticket_for(self, token: str) -> ConsoleTicket:
        """Returns a new session's ticket for a tenant's key, or the renewed ticket for a ticket of the console.

        `token` has just been authenticated. Raises NotAuthenticated if its key was changed meanwhile.
        """
        now = self._clock.now()
        parts = parse_key(token) or parse_ticket(token)
        if isinstance(parts, KeyParts):
            return ticket_of_key(parts, now, self._pepper)
        holder = None if parts is None else await self._holders.find(parts)
        if parts is None or holder is None:
            raise _wrong_key()
        return parts.renewed(now, holder[0].key_hash, self._pepper)

    # The audit log

    async def audit(self, page: PageRequest = FIRST_PAGE) -> Page[AuditEntry]:
        """Returns one page of the audit log. By default, it has the newest entries."""
        async with self._database.read() as session:
            return await repository.list_audit_entries(session, page)

    async def _change_tenant(self, tenant_id: TenantId, changes: Mapping[str, Any], action: str, actor: str) -> Tenant:
        async with self._database.write() as session:
            tenant = replace(await _hold_tenant(session, tenant_id), **changes)
            _check_tenant(tenant.name, tenant.weight, tenant.service_tier_ceiling)
            if changes:
                await repository.change_tenant(session, tenant_id, changes)
            await self._audit(session, actor, action, tenant_id, tenant_id, dict(changes))
            await key_rows.count_access_change(session)
        self.changes.note_change()
        return tenant

    async def _audit(
        self, session: WriteSession, actor: str, action: str, tenant_id: TenantId, target: str, details: dict[str, Any]
    ) -> None:
        entry = AuditEntry(new_id("aud"), self._clock.now(), actor, action, tenant_id, target, details)
        await repository.add_audit_entry(session, entry)


async def _tenant(session: ReadSession, tenant_id: TenantId) -> Tenant:
    return _existing(await repository.find_tenant(session, tenant_id), tenant_id)


async def _hold_tenant(session: WriteSession, tenant_id: TenantId) -> Tenant:
    """Locks the tenant's row until the transaction ends, so that rows that belong to it may be written."""
    return _existing(await repository.hold_tenant(session, tenant_id), tenant_id)


def _existing(tenant: Tenant | None, tenant_id: TenantId) -> Tenant:
    if tenant is None:
        raise NotFound(f"There is no tenant {tenant_id!r}.")
    return tenant


async def _hold_key(session: WriteSession, tenant_id: TenantId, key_id: KeyId) -> ApiKey:
    await _hold_tenant(session, tenant_id)
    key = await key_rows.find_key(session, tenant_id, key_id)
    if key is None:
        raise NotFound(f"There is no key {key_id!r}.")
    return key


def _refuse_seat(key: ApiKey) -> None:
    """Raises Conflict for the key with which a person acts: the person's roles decide when it ends."""
    if key.person_id is not None:
        message = (
            f"This key is that of the person {key.person_id!r} and ends with the role, which an operator takes back."
        )
        raise Conflict(message, code="key_of_person")


def _wrong_key() -> NotAuthenticated:
    return NotAuthenticated("This API key is not valid; check that it was copied whole.")


def _check_tenant(name: str, weight: float, service_tier_ceiling: str) -> None:
    check_name(name)
    if not 0 < weight < math.inf:
        raise ValidationFailed("weight must be a number above 0.", param="weight")
    if service_tier_ceiling not in SERVICE_TIERS:
        raise ValidationFailed(
            f"service_tier_ceiling must be one of {', '.join(SERVICE_TIERS)}.", param="service_tier_ceiling"
        )
