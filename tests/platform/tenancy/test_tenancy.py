"""Tests of tenants, keys and quotas on both databases."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from sqlalchemy import text

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Base, Database
from graftwork.platform.errors import Conflict, NotAuthenticated, NotFound, NotPermitted, ValidationFailed
from graftwork.platform.ids import KeyId, RequestId, TenantId
from graftwork.platform.keys.scopes import ALL_SCOPES, Scope
from graftwork.platform.keys.wrong_keys import WrongKeyLimit
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.authenticator import AdminKey, Authenticator
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import AdminPrincipal
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.tenants import TenantStatus
from graftwork.platform.tenancy.verified_keys import RecentKeys
from graftwork.platform.tracing.logs import JsonFormatter

PEPPER = b"a pepper for tests"
ADDRESS = "192.0.2.1"
ADMIN_KEY = "gwa_operator_0123456789abcdef0123456789abcdef"


@pytest.fixture
def tenancy(database: Database, manual_clock: ManualClock) -> Tenancy:
    return Tenancy(database, PEPPER, manual_clock)


async def test_a_key_authenticates_its_tenant(tenancy: Tenancy) -> None:
    """A new key authenticates a principal with the tenant's name, weight and ceiling."""
    tenant = await tenancy.create_tenant("acme", weight=2.5, service_tier_ceiling="priority")
    key, plaintext = await tenancy.create_key(tenant.id, "ci", scopes=["inference"])

    principal = await tenancy.authenticate(plaintext)

    assert (principal.tenant_id, principal.tenant_name, principal.key_id) == (tenant.id, "acme", key.id)
    assert (principal.weight, principal.tier_ceiling, principal.scopes) == (2.5, "priority", frozenset({"inference"}))
    with pytest.raises(NotPermitted):
        principal.require(Scope.ADAPTERS)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"),
        lambda key: key[:-1],
        lambda key: key + "A",
        lambda key: key.replace("gw_", "gwa_", 1),
        lambda key: "gw_unknownunkno_" + key.split("_")[2],
        lambda key: "",
        lambda key: "gw_",
        lambda key: "gw__",
        lambda key: "sk-" + "a" * 48,
        lambda key: "gw_é_" + key.split("_")[2],
        lambda key: key + "\0",
        lambda key: "gw_a_" + "x" * 100_000,
    ],
)
async def test_anything_but_the_whole_key_is_refused(
    sqlite_database: Database, manual_clock: ManualClock, spoil: Callable[[str], str]
) -> None:
    """One wrong, missing or added character, or another shape altogether, is a 401 that does not repeat the key."""
    tenancy = Tenancy(sqlite_database, PEPPER, manual_clock)
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")
    spoiled = spoil(plaintext)

    with pytest.raises(NotAuthenticated) as refusal:
        await tenancy.authenticate(spoiled)

    assert not spoiled or spoiled not in str(refusal.value.body())


async def test_a_key_is_worthless_under_another_pepper(
    tenancy: Tenancy, database: Database, manual_clock: ManualClock
) -> None:
    """A key is refused under another pepper."""
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")

    with pytest.raises(NotAuthenticated):
        await Tenancy(database, b"another pepper", manual_clock).authenticate(plaintext)


async def test_a_key_ends_at_its_time(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """A key works until the second it expires, and answers `expired_api_key` from then on."""
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci", expires_at=manual_clock.now() + 10)
    manual_clock.advance(9.9)
    await tenancy.authenticate(plaintext)
    manual_clock.advance(0.1)

    with pytest.raises(NotAuthenticated) as refusal:
        await tenancy.authenticate(plaintext)

    assert refusal.value.code == "expired_api_key"


async def test_a_revoked_key_is_refused_and_stays_listed(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """Revoking ends a key for good: it cannot be used or rotated, and revoking again changes nothing."""
    tenant = await tenancy.create_tenant("acme")
    key, plaintext = await tenancy.create_key(tenant.id, "ci")

    revoked = await tenancy.revoke_key(tenant.id, key.id)
    manual_clock.advance(5)
    again = await tenancy.revoke_key(tenant.id, key.id)

    assert again.revoked_at == revoked.revoked_at == manual_clock.now() - 5
    assert [listed.revoked_at for listed in (await tenancy.list_keys(tenant.id)).items] == [revoked.revoked_at]
    with pytest.raises(NotAuthenticated):
        await tenancy.authenticate(plaintext)
    with pytest.raises(Conflict):
        await tenancy.rotate_key(tenant.id, key.id)


async def test_a_suspended_tenant_is_kept_out_until_resumed(tenancy: Tenancy) -> None:
    """A suspended tenant's keys answer 403, and work again when it is resumed."""
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")

    suspended = await tenancy.suspend_tenant(tenant.id)

    assert suspended.status is TenantStatus.SUSPENDED
    with pytest.raises(NotPermitted) as refusal:
        await tenancy.authenticate(plaintext)
    assert refusal.value.code == "tenant_suspended"
    assert (await tenancy.resume_tenant(tenant.id)).status is TenantStatus.ACTIVE
    await tenancy.authenticate(plaintext)


async def test_a_deleted_tenant_leaves_only_its_history(tenancy: Tenancy, database: Database) -> None:
    """Deleting removes the tenant's keys and quota, and keeps its usage and its audit entries."""
    tenant = await tenancy.create_tenant("acme")
    key, plaintext = await tenancy.create_key(tenant.id, "ci")
    await tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(max_sessions=3))
    meter = UsageMeter(database)
    await meter.record(UsageEvent(RequestId("req_1"), tenant.id, key.id, "base", None, None, 10, 0, 5, at=1000.0))

    await tenancy.delete_tenant(tenant.id)

    with pytest.raises(NotAuthenticated):
        await tenancy.authenticate(plaintext)
    with pytest.raises(NotFound):
        await tenancy.get_tenant(tenant.id)
    with pytest.raises(NotFound):
        await tenancy.delete_tenant(tenant.id)
    assert await tenancy.limits.of_tenant(tenant.id) == Quota()
    assert (await tenancy.list_tenants()).items == ()
    async with database.read() as session:
        assert await session.scalar(text("SELECT count(*) FROM api_keys")) == 0
    assert [summary.requests for summary in await meter.summarise(tenant.id, 0, 2000)] == [1]
    actions = [entry.action for entry in (await tenancy.audit()).items]
    assert set(actions) == {"tenant.created", "key.created", "quota.set", "tenant.deleted"}


async def test_no_key_slips_in_while_its_tenant_is_deleted(tenancy: Tenancy, database: Database) -> None:
    """A key that is made while its tenant is deleted is refused or deleted too."""
    tenant = await tenancy.create_tenant("acme")

    results = await asyncio.gather(
        *(tenancy.create_key(tenant.id, f"key {number}") for number in range(3)),
        tenancy.delete_tenant(tenant.id),
        *(tenancy.create_key(tenant.id, f"key {number}") for number in range(3)),
        return_exceptions=True,
    )

    assert all(isinstance(result, NotFound) for result in results if isinstance(result, BaseException))
    async with database.read() as session:
        assert await session.scalar(text("SELECT count(*) FROM api_keys")) == 0


async def test_another_tenants_key_does_not_exist(tenancy: Tenancy) -> None:
    """Another tenant's key id gives the same error as an unknown id."""
    tenants = [await tenancy.create_tenant(name) for name in ("acme", "umbrella")]
    key, _ = await tenancy.create_key(tenants[0].id, "ci")

    with pytest.raises(NotFound) as foreign:
        await tenancy.revoke_key(tenants[1].id, key.id)
    with pytest.raises(NotFound) as unknown:
        await tenancy.revoke_key(tenants[1].id, KeyId("key_unknown"))

    assert foreign.value.message == unknown.value.message.replace("key_unknown", key.id)
    assert (await tenancy.list_keys(tenants[1].id)).items == ()


async def test_updates_change_only_what_is_given(tenancy: Tenancy) -> None:
    """A patch of one field leaves the others, and is what later readers see."""
    tenant = await tenancy.create_tenant("acme", weight=2.0)

    await tenancy.update_tenant(tenant.id, service_tier_ceiling="flex")

    found = await tenancy.get_tenant(tenant.id)
    assert (found.name, found.weight, found.service_tier_ceiling) == ("acme", 2.0, "flex")


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "a" * 201}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"service_tier_ceiling": "gold"}, "service_tier_ceiling"),
    ],
)
async def test_a_wrong_value_is_named(
    sqlite_database: Database, manual_clock: ManualClock, values: dict[str, str], param: str
) -> None:
    """Creating and updating refuse the same values, each naming the field."""
    tenancy = Tenancy(sqlite_database, PEPPER, manual_clock)
    tenant = await tenancy.create_tenant("acme")

    with pytest.raises(ValidationFailed) as on_create:
        await tenancy.create_tenant(**({"name": "other"} | values))  # type: ignore[arg-type]
    with pytest.raises(ValidationFailed) as on_update:
        await tenancy.update_tenant(tenant.id, **values)  # type: ignore[arg-type]

    assert (on_create.value.param, on_update.value.param) == (param, param)
    assert len((await tenancy.list_tenants()).items) == 1


async def test_an_unknown_scope_is_refused(tenancy: Tenancy) -> None:
    """A key with an unknown scope is refused, and a key made without scopes has all of them."""
    tenant = await tenancy.create_tenant("acme")

    with pytest.raises(ValidationFailed):
        await tenancy.create_key(tenant.id, "ci", scopes=["everything"])

    key, _ = await tenancy.create_key(tenant.id, "ci")
    assert key.scopes == ALL_SCOPES


async def test_quotas_are_replaced_as_a_whole(tenancy: Tenancy) -> None:
    """A new quota removes limits that it does not name, and keeps large byte counts exactly."""
    tenant = await tenancy.create_tenant("acme")
    assert await tenancy.limits.of_tenant(tenant.id) == Quota()

    await tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(requests_per_minute=0, max_adapter_bytes=2**50))
    await tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(max_device_kv_bytes=2**50))

    assert await tenancy.limits.of_tenant(tenant.id) == Quota(max_device_kv_bytes=2**50)
    with pytest.raises(NotFound):
        await tenancy.limits.set(LimitOwner.tenant(TenantId("ten_unknown")), Quota())


async def test_pages_follow_each_other_without_gap_or_overlap(tenancy: Tenancy) -> None:
    """Pages by cursor list every tenant once in either order."""
    made = {(await tenancy.create_tenant(f"tenant {number}")).id for number in range(5)}

    for order in Order:
        met: list[str] = []
        has_more = True
        while has_more:
            page = await tenancy.list_tenants(PageRequest(limit=2, after=met[-1] if met else None, order=order))
            met += [tenant.id for tenant in page.items]
            has_more = page.has_more
        assert met == sorted(made, reverse=order is Order.DESCENDING)


async def test_no_secret_is_stored_or_logged(
    tenancy: Tenancy, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The secrets of created and rotated keys appear in no row of any table and in no log record, even at debug."""
    caplog.set_level(logging.DEBUG)
    tenant = await tenancy.create_tenant("acme")
    key, first = await tenancy.create_key(tenant.id, "ci")
    new, second = await tenancy.rotate_key(tenant.id, key.id)
    await tenancy.authenticate(second)
    await tenancy.revoke_key(tenant.id, new.id)
    for refused in (first, second, first[:-1]):
        with pytest.raises(NotAuthenticated):
            await tenancy.authenticate(refused)

    stored = ""
    async with database.read() as session:
        for table in Base.metadata.sorted_tables:
            if table.name in {"tenants", "api_keys", "quotas", "usage_events", "audit_entries", "idempotency_keys"}:
                stored += repr((await session.execute(table.select())).all())
    logged = "".join(JsonFormatter().format(record) + repr(vars(record)) for record in caplog.records)

    assert key.public_id in stored
    for plaintext in (first, second):
        secret = plaintext.split("_")[2]
        assert secret not in stored
        assert secret.encode() not in stored.encode()
        assert secret not in logged
        assert secret not in repr(key)


def test_a_key_that_is_logged_by_mistake_is_blotted_out() -> None:
    """The secret of a key is removed from log messages and fields."""
    record = logging.makeLogRecord({"msg": "sent %s", "args": (ADMIN_KEY,), "token": "gw_abc_" + "x" * 43})

    line = JsonFormatter().format(record)

    assert "gwa_operator_…" in line
    assert "gw_abc_…" in line
    assert "0123456789abcdef" not in line
    assert "xxx" not in line


async def test_each_door_opens_to_its_own_kind_of_key(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """The wrong kind of a right key is a 403; a wrong key is a 401 at both doors."""
    admin_key = AdminKey(ADMIN_KEY, PEPPER, manual_clock)
    gate = Authenticator(
        tenancy, admin_key, WrongKeyLimit(manual_clock, burst=20), RecentKeys(manual_clock), manual_clock
    )
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")

    assert (await gate.authenticate(plaintext, ADDRESS)).tenant_id == tenant.id
    assert await gate.authenticate_admin(ADMIN_KEY, ADDRESS) == AdminPrincipal()
    with pytest.raises(NotPermitted):
        await gate.authenticate(ADMIN_KEY, ADDRESS)
    with pytest.raises(NotPermitted):
        await gate.authenticate_admin(plaintext, ADDRESS)
    for wrong in (ADMIN_KEY[:-1], plaintext[:-1], "", "é"):
        with pytest.raises(NotAuthenticated):
            await gate.authenticate(wrong, ADDRESS)
        with pytest.raises(NotAuthenticated):
            await gate.authenticate_admin(wrong, ADDRESS)
