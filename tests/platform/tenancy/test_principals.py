"""Tests of a principal's permissions, isolation domain and service tier, and of the end of its running work."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.keys.scopes import ALL_SCOPES, Scope
from graftwork.platform.tenancy.principals import (
    SERVICE_TIERS,
    AccessWatch,
    Principal,
    RunningWork,
)
from graftwork.platform.tenancy.tenancy import Tenancy


def principal(tenant: str = "ten_1", key: str = "key_1", ceiling: str = "default") -> Principal:
    return Principal(TenantId(tenant), "acme", KeyId(key), 1.0, ceiling, frozenset({"inference"}))


def test_a_tenants_keys_share_prefixes_and_tenants_do_not() -> None:
    """All keys of a tenant have one isolation domain, which depends on the pepper and does not show the tenant."""
    domain = principal().isolation(b"pepper")

    assert domain == principal(key="key_2").isolation(b"pepper")
    assert domain != principal(tenant="ten_2").isolation(b"pepper")
    assert domain != principal().isolation(b"other pepper")
    assert domain.find(b"ten_1") == -1


def test_a_scope_that_the_key_lacks_is_refused() -> None:
    """A key permits only its scopes, and the refusal names the missing scope."""
    principal().require(Scope.INFERENCE)

    with pytest.raises(NotPermitted, match="adapters") as caught:
        principal().require(Scope.ADAPTERS)

    assert caught.value.code == "missing_scope"
    assert set(Scope) == ALL_SCOPES


@pytest.mark.parametrize(
    ("ceiling", "asked", "served"),
    [
        ("default", "priority", "default"),
        ("default", "flex", "flex"),
        ("priority", "priority", "priority"),
        ("flex", "default", "flex"),
    ],
)
def test_a_tier_is_capped_by_the_ceiling(ceiling: str, asked: str, served: str) -> None:
    """A request is served in the class it asks for, unless the tenant's ceiling is lower."""
    assert principal(ceiling=ceiling).capped_tier(asked) == served


def test_the_tiers_are_the_engines() -> None:
    """The platform's names for the service tiers are those that the engine admits by."""
    from graftwork.engine.core.requests import ServiceTier

    assert set(SERVICE_TIERS) == set(ServiceTier)


async def test_work_ends_when_its_key_expires(database: Database, manual_clock: ManualClock) -> None:
    """Work of a key is cancelled once the key has expired, and not before. Work of other keys goes on."""
    work = RunningWork()
    tenancy, watch = Tenancy(database, b"pepper", manual_clock), AccessWatch(database, work, manual_clock)
    tenant = await tenancy.create_tenant("acme")
    ended = list[str]()
    for name, lasts_s in (("short", 10.0), ("long", 11.0), ("endless", None)):
        expires_at = None if lasts_s is None else manual_clock.now() + lasts_s
        _, plaintext = await tenancy.create_key(tenant.id, name, expires_at=expires_at)
        holder = await tenancy.authenticate(plaintext)
        work.add(holder, lambda error, name=name: ended.append(f"{name}: {error.code}"))  # type: ignore[misc]

    manual_clock.advance(9.9)
    assert await watch.check() == 0
    manual_clock.advance(0.1)
    assert await watch.check() == 1

    assert ended == ["short: access_ended"]


async def test_work_ends_when_another_process_takes_its_access(database: Database, manual_clock: ManualClock) -> None:
    """Of work with 110 keys, a check ends exactly that whose key is revoked or unknown, or whose tenant is suspended."""
    tenancy, work, ended = Tenancy(database, b"pepper", manual_clock), RunningWork(), set[KeyId]()
    held, suspended = [await tenancy.create_tenant(name) for name in ("held", "suspended")]
    kept, revoked, lost = [(await tenancy.create_key(tenant.id, "key"))[0].id for tenant in (held, held, suspended)]
    unknown = [KeyId(f"key_{place}") for place in range(107)]
    for key_id in (kept, revoked, lost, *unknown):
        work.add(principal(key=key_id), lambda _error, key_id=key_id: ended.add(key_id))  # type: ignore[misc]

    await tenancy.revoke_key(held.id, revoked)
    await tenancy.suspend_tenant(suspended.id)
    num_ended = await AccessWatch(database, work, manual_clock).check()

    assert (num_ended, ended) == (109, {revoked, lost, *unknown})
