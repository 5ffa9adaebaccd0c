"""Checks whether new sessions fit in the limits of their tenant, key, end user and organisation.

Owns the order of the locks: the tenant's row, then the limits of the organisation. So sessions that several gateways
create at one time are counted one after another. Never creates a session.
"""

from collections.abc import Awaitable, Callable, Sequence

from graftwork.platform.database import WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.limits import Level, Limits, OwnerLimits, keeps_too_much
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.platform.tenancy.quota_rows import hold_organisation_quota
from graftwork.sessions.core.session import SessionKind
from graftwork.sessions.store.session_rows import count_open_sessions, lock_tenant

_HOLDERS = {
    Level.ORGANISATION: "The tenants of your organisation have",
    Level.TENANT: "You have",
    Level.KEY: "This key has begun",
    Level.USER: "This end user has",
}


async def of_new(
    limits_of: Callable[[Principal], Awaitable[Limits]], principal: Principal, kind: SessionKind
) -> Sequence[OwnerLimits]:
    """Returns the limits in which a new session of this kind counts, without the organisation's.

    There are none for conversations and internal sessions of the Responses API.
    """
    if kind is not SessionKind.SESSION:
        return ()
    return [owner for owner in (await limits_of(principal)).owners if owner.level is not Level.ORGANISATION]


async def check(
    database: WriteSession, scope: TenantScope, num_new: int, limits: Sequence[OwnerLimits], now: float
) -> None:
    """Raises BudgetSpent if an owner would have more open sessions than it may, with `num_new` more.

    `limits` are those of the tenant, of the key that begins the sessions, and of their end user. Those of the
    organisation are read here.
    """
    bounded = [owner for owner in limits if owner.quota.max_sessions is not None]
    if bounded:
        await lock_tenant(database, scope)
    for owner in bounded:
        await _check_one(database, owner, TenantId(scope), num_new, now)
    held = await hold_organisation_quota(database, scope)
    if held is not None:
        await _check_one(database, OwnerLimits(Level.ORGANISATION, *held), None, num_new, now)


async def _check_one(
    database: WriteSession, owner: OwnerLimits, tenant_id: TenantId | None, num_new: int, now: float
) -> None:
    most = owner.quota.max_sessions
    if most is None:
        return
    num_open = await count_open_sessions(database, LimitOwner(owner.level, owner.owner_id, tenant_id), now)
    if num_open + num_new > most:
        message = f"{_HOLDERS[owner.level]} {num_open} open sessions and may have {most}: close some first."
        raise keeps_too_much(owner.level, "max_sessions", message, code="max_sessions")
