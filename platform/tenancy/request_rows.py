"""Contains the SQL statements that are made for every request before its first token, and for all running work each
second.

Each finds a few rows by an index, for `Database.read_few`. The statements are built once, and they select columns:
to build a statement for each request, and objects of its rows, takes many times as long as SQLite takes to find them.
Never changes anything. The other statements of this room are in `repository.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import String, bindparam, or_, select

from graftwork.platform.database import ReadSession
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.tables import ApiKeyRow, OwnerQuotaRow, QuotaRow, TenantRow
from graftwork.platform.tenancy.tenants import ApiKey, Tenant, TenantStatus

_KEYS, _TENANTS = ApiKeyRow.__table__, TenantRow.__table__
_QUOTAS, _OWNERS = QuotaRow.__table__, OwnerQuotaRow.__table__
_KEY_FIELDS = tuple(field.name for field in fields(ApiKey))
_TENANT_FIELDS = tuple(field.name for field in fields(Tenant))
_LIMITS = tuple(Quota.model_fields)
"""The names of the limits, which are the names of their columns too."""
_OWNER_AT = 2 + len(_LIMITS)
"""Where the columns of the other owners begin in a row of `_STATUS_AND_LIMITS`."""

_HOLDERS = select(*(_KEYS.c[name] for name in _KEY_FIELDS), *(_TENANTS.c[name] for name in _TENANT_FIELDS)).join_from(
    _KEYS, _TENANTS, _TENANTS.c.id == _KEYS.c.tenant_id
)
_ONE_HOLDER = _HOLDERS.where(_KEYS.c.public_id == bindparam("public_id"))
_SOME_HOLDERS = _HOLDERS.where(_KEYS.c.public_id.in_(bindparam("public_ids", expanding=True)))
_USABLE_KEYS = (
    select(_KEYS.c.id)
    .join_from(_KEYS, _TENANTS, _TENANTS.c.id == _KEYS.c.tenant_id)
    .where(
        _KEYS.c.id.in_(bindparam("key_ids", expanding=True)),
        _KEYS.c.revoked_at.is_(None),
        or_(_KEYS.c.expires_at.is_(None), _KEYS.c.expires_at > bindparam("now")),
        _TENANTS.c.status == str(TenantStatus.ACTIVE),
    )
)
_TENANT_LIMITS = tuple(_QUOTAS.c[name] for name in _LIMITS)
_OWNER_LIMITS = tuple(_OWNERS.c[name] for name in _LIMITS)
_STATUS_AND_LIMITS = (
    select(
        _TENANTS.c.status,
        _TENANTS.c.organisation_id,
        *_TENANT_LIMITS,
        _OWNERS.c.owner_id,
        *(column.label(f"owner_{column.name}") for column in _OWNER_LIMITS),
    )
    .join_from(_TENANTS, _QUOTAS, _QUOTAS.c.tenant_id == _TENANTS.c.id, isouter=True)
    .join(
        _OWNERS,
        or_(
            _OWNERS.c.owner_id.in_([bindparam(name, type_=String) for name in ("key_id", "end_user_id", "users_of")]),
            _OWNERS.c.owner_id == _TENANTS.c.organisation_id,
        ),
        isouter=True,
    )
    .where(_TENANTS.c.id == bindparam("tenant_id"))
)

StoredLimits = tuple[TenantStatus, OrganisationId | None, Quota, dict[str, Quota]]
"""The state of a tenant, its organisation, its limits, and those of other owners by their ids."""


async def find_key_holders(session: ReadSession, public_ids: Collection[str]) -> dict[str, tuple[ApiKey, Tenant]]:
    """Returns the API keys with these public ids and their tenants, by public id. Unknown ids are left out.

    This statement needs no tenant as an argument, because its purpose is to find the tenants.
    """
    if len(public_ids) == 1:
        (public_id,) = public_ids
        found = await session.execute(_ONE_HOLDER, {"public_id": public_id})
    else:
        found = await session.execute(_SOME_HOLDERS, {"public_ids": list(public_ids)})
    return {key.public_id: (key, tenant) for key, tenant in map(_holder, found.all())}


async def find_usable_keys(session: ReadSession, key_ids: Collection[KeyId], now: float) -> set[KeyId]:
    """Returns those of the API keys that are not revoked, deleted or expired at the time `now`, and whose tenants are
    active.
    """
    found = await session.execute(_USABLE_KEYS, {"key_ids": list(key_ids), "now": now})
    return {KeyId(key_id) for (key_id,) in found.all()}


async def find_status_and_limits(
    session: ReadSession, tenant_id: TenantId, key_id: KeyId, end_user_id: EndUserId | None
) -> StoredLimits | None:
    """Returns the state of a tenant and its limits, with those of its organisation, of a key, and of an end user. Those of
    each end user have the tenant's id.

    Owners without limits are left out. Returns None for an unknown tenant.
    """
    users_of = None if end_user_id is None else tenant_id
    values = {"tenant_id": tenant_id, "key_id": key_id, "end_user_id": end_user_id, "users_of": users_of}
    rows = (await session.execute(_STATUS_AND_LIMITS, values)).all()
    if not rows:
        return None
    status, organisation_id, *_ = rows[0]
    others = {row[_OWNER_AT]: _quota(*row[_OWNER_AT + 1 :]) for row in rows if row[_OWNER_AT] is not None}
    return (
        TenantStatus(status),
        None if organisation_id is None else OrganisationId(organisation_id),
        _quota(*rows[0][2:_OWNER_AT]),
        others,
    )


@lru_cache(maxsize=1024)
def _quota(*values: Any) -> Quota:
    """Returns the limits of a row. To validate them anew for each request takes as long as to read them."""
    return Quota(**dict(zip(_LIMITS, values, strict=True)))


def _holder(row: Sequence[Any]) -> tuple[ApiKey, Tenant]:
    key = dict(zip(_KEY_FIELDS, row, strict=False))
    tenant = dict(zip(_TENANT_FIELDS, row[len(_KEY_FIELDS) :], strict=True))
    key["scopes"], tenant["status"] = frozenset(key["scopes"]), TenantStatus(tenant["status"])
    if key["adapters"] is not None:
        key["adapters"] = frozenset(key["adapters"])
    if key["allowed_ips"] is not None:
        key["allowed_ips"] = tuple(key["allowed_ips"])
    return ApiKey(**key), Tenant(**tenant)
