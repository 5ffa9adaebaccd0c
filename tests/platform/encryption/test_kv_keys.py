"""Tests of the keys of tenants' KV files: who gets which, for how long, and what an erasure leaves."""

import hashlib
import hmac
from pathlib import Path

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.encryption.kv_keys import TenantKvKeys, kv_key_of
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.errors import InvalidRequest, NotPermitted
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, scope_of_tenant
from graftwork.platform.tenancy.tenancy import Tenancy


@pytest.fixture
def masters(tmp_path: Path) -> MasterKeyFile:
    return MasterKeyFile.create(tmp_path / "master.key")


async def new_tenant(database: Database, clock: ManualClock, name: str) -> TenantId:
    return (await Tenancy(database, b"pepper", clock).create_tenant(name)).id


def test_the_key_is_hkdf_of_the_data_key() -> None:
    """The key is HKDF-SHA256 as RFC 5869 says, written out here; it is not the data key, and follows from it alone."""
    data_key = bytes(range(32))
    extracted = hmac.digest(bytes(32), data_key, hashlib.sha256)

    expected = hmac.digest(extracted, b"graftwork kv files\0" + b"\0\0\0\1" + b"\1", hashlib.sha256)

    assert kv_key_of(data_key) == expected
    assert kv_key_of(data_key) not in (data_key, kv_key_of(bytes(32)))


async def test_every_gateway_has_the_same_key_of_a_tenant(
    database: Database, manual_clock: ManualClock, masters: MasterKeyFile
) -> None:
    """Two gateways derive the same key for a tenant, another tenant has another one, and both last over a rotation."""
    first, second = (TenantKvKeys(TenantKeys(database, manual_clock, masters), manual_clock) for _ in range(2))
    one, other = [await new_tenant(database, manual_clock, name) for name in ("one", "other")]
    before = await first.of(one)
    masters.rotate()
    await TenantKeys(database, manual_clock, masters).rewrap()
    manual_clock.advance(61)

    assert await first.of(one) == await second.of(one) == before
    assert await second.of(other) != before


async def test_a_destroyed_key_is_gone_within_a_minute(
    database: Database, manual_clock: ManualClock, masters: MasterKeyFile
) -> None:
    """When the data key of a deleted tenant is destroyed, no gateway derives the key again once it has forgotten it: the one
    that destroys it at once, another one after a minute.
    """
    keys = TenantKeys(database, manual_clock, masters)
    here, elsewhere = (
        TenantKvKeys(keys, manual_clock),
        TenantKvKeys(TenantKeys(database, manual_clock, masters), manual_clock),
    )
    tenant = await new_tenant(database, manual_clock, "acme")
    assert await here.of(tenant) == await elsewhere.of(tenant)
    await Tenancy(database, b"pepper", manual_clock).delete_tenant(tenant)
    await keys.destroy(scope_of_tenant(AdminPrincipal(), tenant))

    with pytest.raises(NotPermitted):
        await here.of(tenant)
    manual_clock.advance(61)
    with pytest.raises(NotPermitted):
        await elsewhere.of(tenant)


async def test_a_key_is_asked_for_once_a_minute(
    database: Database, manual_clock: ManualClock, masters: MasterKeyFile
) -> None:
    """Requests within a minute read no database: they get the key although the database is closed."""
    kv_keys = TenantKvKeys(TenantKeys(database, manual_clock, masters), manual_clock)
    tenant = await new_tenant(database, manual_clock, "acme")
    key = await kv_keys.of(tenant)
    await database.close()
    manual_clock.advance(59)

    assert await kv_keys.of(tenant) == key


def test_encryption_without_master_keys_is_refused(database: Database, manual_clock: ManualClock) -> None:
    """The refusal names the setting, and the one that is missing."""
    with pytest.raises(InvalidRequest, match="master_key_file") as refused:
        TenantKvKeys(TenantKeys(database, manual_clock, None), manual_clock)

    assert refused.value.param == "encrypt_kv_files"
