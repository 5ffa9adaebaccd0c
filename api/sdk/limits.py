"""Defines `client.admin.organisations`, `client.admin.quotas` and `client.admin.webhooks`: groups of tenants, the limits of
organisations, tenants, keys and end users, and where alerts of budgets are sent.

Every call sends the admin key.
"""

from typing import Unpack

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.admin import Organisation, OwnerQuota, Quota, QuotaLimits, Tenant, Webhook
from graftwork.platform.answers.base import Deleted, Page


def tenant_path(tenant_id: str) -> str:
    return f"/v1/admin/tenants/{path_segment(tenant_id)}"


def _organisation_path(organisation_id: str) -> str:
    return f"/v1/admin/organisations/{path_segment(organisation_id)}"


class Organisations(Resource[R]):
    """Creates, changes and deletes organisations, and says which tenants belong to them.

    Sends requests to `/v1/admin/organisations`.
    """

    @operation
    def create(self, name: str) -> Steps[Organisation]:
        call = Call("POST", "/v1/admin/organisations", json={"name": name}, admin=True, creates=True)
        return (yield from self._read(Organisation, call))

    @operation
    def list(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[Organisation]]:
        call = Call("GET", "/v1/admin/organisations", query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(Organisation, call))

    @operation
    def get(self, organisation_id: str) -> Steps[Organisation]:
        return (yield from self._read(Organisation, Call("GET", _organisation_path(organisation_id), admin=True)))

    @operation
    def rename(self, organisation_id: str, name: str) -> Steps[Organisation]:
        call = Call("PATCH", _organisation_path(organisation_id), json={"name": name}, admin=True)
        return (yield from self._read(Organisation, call))

    @operation
    def delete(self, organisation_id: str) -> Steps[Deleted]:
        """Deletes an organisation with its limits. The server refuses this while tenants belong to it."""
        return (yield from self._read(Deleted, Call("DELETE", _organisation_path(organisation_id), admin=True)))

    @operation
    def tenants(
        self, organisation_id: str, *, limit: int | None = None, after: str | None = None
    ) -> Steps[Page[Tenant]]:
        """Lists the tenants that belong to an organisation."""
        path = f"{_organisation_path(organisation_id)}/tenants"
        call = Call("GET", path, query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(Tenant, call))

    @operation
    def add_tenant(self, organisation_id: str, tenant_id: str) -> Steps[Tenant]:
        """Makes a tenant belong to an organisation, and to no other one."""
        path = f"{_organisation_path(organisation_id)}/tenants/{path_segment(tenant_id)}"
        return (yield from self._read(Tenant, Call("PUT", path, admin=True)))

    @operation
    def remove_tenant(self, organisation_id: str, tenant_id: str) -> Steps[Tenant]:
        """Makes a tenant of an organisation belong to none."""
        path = f"{_organisation_path(organisation_id)}/tenants/{path_segment(tenant_id)}"
        return (yield from self._read(Tenant, Call("DELETE", path, admin=True)))


class Quotas(Resource[R]):
    """Reads limits, with what is used of them, and sets them.

    `set` and its relatives replace all limits: the server removes each one that you leave out.
    """

    @operation
    def get(self, tenant_id: str) -> Steps[OwnerQuota]:
        return (yield from self._read(OwnerQuota, Call("GET", f"{tenant_path(tenant_id)}/quota", admin=True)))

    @operation
    def set(self, tenant_id: str, **limits: Unpack[QuotaLimits]) -> Steps[Quota]:
        """Replaces all limits of a tenant."""
        call = Call("PUT", f"{tenant_path(tenant_id)}/quota", json=dict(limits), admin=True)
        return (yield from self._read(Quota, call))

    @operation
    def get_organisation(self, organisation_id: str) -> Steps[OwnerQuota]:
        return (
            yield from self._read(OwnerQuota, Call("GET", f"{_organisation_path(organisation_id)}/quota", admin=True))
        )

    @operation
    def set_organisation(self, organisation_id: str, **limits: Unpack[QuotaLimits]) -> Steps[Quota]:
        """Replaces all limits of an organisation, which its tenants share."""
        call = Call("PUT", f"{_organisation_path(organisation_id)}/quota", json=dict(limits), admin=True)
        return (yield from self._read(Quota, call))

    @operation
    def get_key(self, tenant_id: str, key_id: str) -> Steps[OwnerQuota]:
        path = f"{tenant_path(tenant_id)}/keys/{path_segment(key_id)}/quota"
        return (yield from self._read(OwnerQuota, Call("GET", path, admin=True)))

    @operation
    def set_key(self, tenant_id: str, key_id: str, **limits: Unpack[QuotaLimits]) -> Steps[Quota]:
        """Replaces all limits of an API key."""
        path = f"{tenant_path(tenant_id)}/keys/{path_segment(key_id)}/quota"
        return (yield from self._read(Quota, Call("PUT", path, json=dict(limits), admin=True)))

    @operation
    def get_user(self, tenant_id: str, user: str | None = None) -> Steps[OwnerQuota]:
        """Reads the limits of an end user; for None, those of each end user without limits of its own."""
        call = Call("GET", f"{tenant_path(tenant_id)}/user_quota", query={"user": user}, admin=True)
        return (yield from self._read(OwnerQuota, call))

    @operation
    def set_user(self, tenant_id: str, user: str | None = None, **limits: Unpack[QuotaLimits]) -> Steps[Quota]:
        """Replaces the limits of an end user; for None, those of each end user without limits of its own."""
        path, query = f"{tenant_path(tenant_id)}/user_quota", {"user": user}
        return (yield from self._read(Quota, Call("PUT", path, query=query, json=dict(limits), admin=True)))


class Webhooks(Resource[R]):
    """Reads, sets and deletes the webhooks that get alerts of budgets. An owner is a tenant's or an organisation's id."""

    @operation
    def get(self, owner_id: str) -> Steps[Webhook]:
        return (yield from self._read(Webhook, Call("GET", _webhook_path(owner_id), admin=True)))

    @operation
    def set(self, owner_id: str, url: str) -> Steps[Webhook]:
        """Sets or replaces a webhook. Only this answer has the key of its signatures, in the field `secret`."""
        return (yield from self._read(Webhook, Call("PUT", _webhook_path(owner_id), json={"url": url}, admin=True)))

    @operation
    def delete(self, owner_id: str) -> Steps[Deleted]:
        return (yield from self._read(Deleted, Call("DELETE", _webhook_path(owner_id), admin=True)))


def _webhook_path(owner_id: str) -> str:
    of_organisation = owner_id.startswith("org_")
    return f"{_organisation_path(owner_id) if of_organisation else tenant_path(owner_id)}/webhook"
