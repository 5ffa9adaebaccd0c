"""Sets and deletes the webhooks of organisations and tenants.

Owns every change to them. Each change adds an entry to the audit log in the same transaction. Never sends anything.
"""

from graftwork.platform.alerts import repository
from graftwork.platform.alerts.repository import Webhook
from graftwork.platform.alerts.signing import webhook_secret
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.outbound.public_addresses import check_url
from graftwork.platform.tenancy.limit_book import LimitOwner, require_owner
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.repository import add_audit_entry
from graftwork.platform.tenancy.tenants import AuditEntry


class Webhooks:
    """The webhooks of organisations and tenants, in the database. An owner has one webhook at most."""

    def __init__(self, database: Database, clock: Clock, pepper: bytes) -> None:
        self._database = database
        self._clock = clock
        self._pepper = pepper

    async def get(self, owner: LimitOwner) -> Webhook:
        """Returns the webhook of an owner. Raises NotFound if the owner or its webhook does not exist."""
        async with self._database.read() as session:
            await require_owner(session, owner)
            found = await repository.find_webhook(session, owner.owner_id)
        if found is None:
            raise NotFound(f"There is no webhook of {owner.owner_id!r}.")
        return found

    async def set(self, owner: LimitOwner, url: str, *, actor: str = "admin") -> tuple[Webhook, str]:
        """Sets or replaces the webhook of an owner. Returns it with its new secret, which is not shown again.

        Raises NotFound if the owner does not exist, and ValidationFailed for a URL that is not allowed.
        """
        check_url(url)
        webhook = Webhook(owner.owner_id, new_id("whk"), url, self._clock.now())
        async with self._database.write() as session:
            await require_owner(session, owner)
            await repository.put_webhook(session, webhook)
            await add_audit_entry(session, self._entry(owner, actor, "webhook.set", {"url": url}))
        return webhook, webhook_secret(webhook.webhook_id, self._pepper)

    async def delete(self, owner: LimitOwner, *, actor: str = "admin") -> None:
        """Deletes the webhook of an owner. Raises NotFound if the owner or its webhook does not exist."""
        async with self._database.write() as session:
            await require_owner(session, owner)
            if not await repository.delete_webhook(session, owner.owner_id):
                raise NotFound(f"There is no webhook of {owner.owner_id!r}.")
            await add_audit_entry(session, self._entry(owner, actor, "webhook.deleted", {}))

    async def erase(self, scope: TenantScope) -> bool:
        """Deletes the webhook and the alerts of a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await repository.delete_webhook(session, scope)
            await repository.erase_alerts(session, scope)
        return True

    def _entry(self, owner: LimitOwner, actor: str, action: str, details: dict[str, str]) -> AuditEntry:
        tenant_id = owner.tenant_id or TenantId("")
        return AuditEntry(new_id("aud"), self._clock.now(), actor, action, tenant_id, owner.owner_id, details)
