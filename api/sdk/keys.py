"""Defines `client.keys` and `client.members`, with which a tenant-admin manages the keys of the own tenant and sees its
members, and `client.admin.keys`, with which an operator manages the keys of any tenant.

    client = Graftwork("https://graftwork.example.com")  # signed in with `graftwork login` as a tenant-admin
    secret = client.keys.create(name="ci", scopes=("inference",)).key

The server shows the secret of a key once. If its answer is lost and the client asks again, the new key comes without its
secret (`key` is None): revoke that key, and create another.
"""

from typing import Any, Unpack

from typing_extensions import TypedDict

from graftwork.api.sdk.account import Moment
from graftwork.api.sdk.limits import tenant_path
from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.admin import TenantKey
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.people import TenantMember

_KEYS = "/v1/keys"


class KeyRules(TypedDict, total=False):
    """What a new key allows. A rule that is missing or None allows everything."""

    scopes: tuple[str, ...] | None
    """What the key may do, such as `inference` or `usage`. Without any, it reads models and adapters."""
    adapters: tuple[str, ...] | None
    """The models that the key may name, without versions and aliases. The base model counts."""
    allowed_ips: tuple[str, ...] | None
    """The networks from which the key may be used, such as `192.0.2.0/24`."""
    expires_at: Moment | None
    """When the key ends, as Unix seconds or ISO 8601 text."""


class OwnKeys(Resource[R]):
    """Creates, lists, rotates and revokes the keys of the tenant in which the sender acts. Sends requests to `/v1/keys`.

    Only a person who has signed in as a tenant-admin may. Others get PermissionDeniedError with the code
    `not_tenant_admin`.
    """

    @operation
    def create(self, *, name: str, **rules: Unpack[KeyRules]) -> Steps[TenantKey]:
        """Creates a key. Only this answer has the secret text of the key, in the field `key`."""
        call = Call("POST", _KEYS, json=_given(name=name, **rules), creates=True)
        return (yield from self._read(TenantKey, call))

    @operation
    def list(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[TenantKey]]:
        """Lists the keys, the newest first: also those that were revoked, and those with which members act."""
        return (yield from self._page(TenantKey, Call("GET", _KEYS, query={"limit": limit, "after": after})))

    @operation
    def rotate(
        self, key_id: str, *, overlap_s: float | None = None, expires_at: Moment | None = None
    ) -> Steps[TenantKey]:
        """Creates a key that allows the same as an old one. Only this answer has the secret of the new key.

        The old key ends after `overlap_s` seconds, by default at once. The new key ends at `expires_at`, by default
        when the old key would have ended.
        """
        body = _given(overlap_s=overlap_s, expires_at=expires_at)
        call = Call("POST", f"{_KEYS}/{path_segment(key_id)}/rotate", json=body, creates=True)
        return (yield from self._read(TenantKey, call))

    @operation
    def revoke(self, key_id: str) -> Steps[TenantKey]:
        """Revokes a key. The key never works again, but the list of keys still shows it."""
        return (yield from self._read(TenantKey, Call("DELETE", f"{_KEYS}/{path_segment(key_id)}")))


class Members(Resource[R]):
    """Lists the people who have a role in the tenant in which the sender acts. Sends `GET /v1/members`."""

    @operation
    def list(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[TenantMember]]:
        """Lists the members, the newest first. Only a tenant-admin may, as for the keys."""
        return (yield from self._page(TenantMember, Call("GET", "/v1/members", query={"limit": limit, "after": after})))


class TenantKeys(Resource[R]):
    """Creates, lists, rotates and revokes the keys of a tenant, for an operator.

    Sends requests to `/v1/admin/tenants/{id}/keys`.
    """

    @operation
    def create(self, tenant_id: str, *, name: str, **rules: Unpack[KeyRules]) -> Steps[TenantKey]:
        """Creates a key of a tenant. Only this answer has the secret text of the key, in the field `key`."""
        call = Call("POST", _keys_of(tenant_id), json=_given(name=name, **rules), admin=True, creates=True)
        return (yield from self._read(TenantKey, call))

    @operation
    def list(self, tenant_id: str, *, limit: int | None = None, after: str | None = None) -> Steps[Page[TenantKey]]:
        """Lists the keys of a tenant, the newest first: also those that were revoked."""
        call = Call("GET", _keys_of(tenant_id), query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(TenantKey, call))

    @operation
    def rotate(
        self, tenant_id: str, key_id: str, *, overlap_s: float | None = None, expires_at: Moment | None = None
    ) -> Steps[TenantKey]:
        """Creates a key that allows the same as an old one. Only this answer has the secret of the new key.

        The old key ends after `overlap_s` seconds, by default at once. The new key ends at `expires_at`, by default
        when the old key would have ended.
        """
        path = f"{_keys_of(tenant_id)}/{path_segment(key_id)}/rotate"
        body = _given(overlap_s=overlap_s, expires_at=expires_at)
        return (yield from self._read(TenantKey, Call("POST", path, json=body, admin=True, creates=True)))

    @operation
    def revoke(self, tenant_id: str, key_id: str) -> Steps[TenantKey]:
        """Revokes a key. The key never works again, but the list of keys still shows it."""
        path = f"{_keys_of(tenant_id)}/{path_segment(key_id)}"
        return (yield from self._read(TenantKey, Call("DELETE", path, admin=True)))


def _keys_of(tenant_id: str) -> str:
    return f"{tenant_path(tenant_id)}/keys"


def _given(**values: Any) -> dict[str, Any]:
    """Returns the values of a body without those that are None."""
    return {name: value for name, value in values.items() if value is not None}
