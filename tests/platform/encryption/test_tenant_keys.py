"""Tests of master keys and data keys: wrapping, rotation, destruction, and refusals."""

import asyncio
import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.tenant_keys import TenantKeys, open_tenant_keys
from graftwork.platform.errors import Conflict, InvalidRequest, NotPermitted, Unavailable
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.tenancy import Tenancy

CONTEXT = b"ten_1"


@pytest.fixture
def masters(tmp_path: Path) -> MasterKeyFile:
    return MasterKeyFile.create(tmp_path / "master.key")


@pytest.fixture
def keys(database: Database, manual_clock: ManualClock, masters: MasterKeyFile) -> TenantKeys:
    return TenantKeys(database, manual_clock, masters)


async def new_tenant(database: Database, clock: ManualClock, name: str = "acme") -> TenantScope:
    return scope_of_tenant(AdminPrincipal(), (await Tenancy(database, b"pepper", clock).create_tenant(name)).id)


def test_a_file_of_master_keys_is_private_and_never_overwritten(tmp_path: Path) -> None:
    """The file has mode 0600. A file that is there is not replaced, and one that others can read is refused."""
    path = tmp_path / "master.key"
    MasterKeyFile.create(path)
    content = path.read_text()

    with pytest.raises(Conflict):
        MasterKeyFile.create(path)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (0o600, content)
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        MasterKeyFile.load(path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": "graftwork-master-keys-1", "current": "a", "keys": {}}']
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    """A file that is missing, or that holds something else, is refused with its name."""
    path = tmp_path / "master.key"
    with pytest.raises(InvalidRequest, match=r"master\.key"):
        MasterKeyFile.load(path)
    path.write_text(content)
    path.chmod(0o600)

    with pytest.raises(InvalidRequest, match="no file of master keys"):
        MasterKeyFile.load(path)


def test_rotations_at_the_same_moment_lose_no_key(masters: MasterKeyFile, tmp_path: Path) -> None:
    """Of rotations that begin at once, each adds its key to those of all others, also one that read the file before."""
    path, together = tmp_path / "master.key", threading.Barrier(8)
    first = masters.current_id

    def rotate(file: MasterKeyFile) -> str:
        together.wait()
        return file.rotate()

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(rotate, [MasterKeyFile.load(path) for _ in range(8)]))

    stored = MasterKeyFile.load(path)
    assert {first, *made} == set(stored.key_ids)
    assert (len(stored.key_ids), stored.current_id in made) == (9, True)


def test_a_key_is_unwrapped_by_its_master_and_for_its_tenant_only(masters: MasterKeyFile, tmp_path: Path) -> None:
    """A wrapped key is unwrapped with the same master and context, and is an error with another one."""
    wrapped = masters.wrap(b"k" * 32, CONTEXT)

    assert masters.unwrap(wrapped, CONTEXT) == b"k" * 32
    assert b"k" * 8 not in wrapped.blob
    with pytest.raises(InvalidRequest, match="not the one"):
        masters.unwrap(wrapped, b"ten_2")
    with pytest.raises(InvalidRequest, match="lacks the master key"):
        MasterKeyFile.create(tmp_path / "other.key").unwrap(wrapped, CONTEXT)


async def test_each_tenant_has_one_key(
    database: Database, manual_clock: ManualClock, keys: TenantKeys, masters: MasterKeyFile
) -> None:
    """A tenant's key is made once, also if several gateways ask at the same time; it is no other tenant's."""
    mine, other = [await new_tenant(database, manual_clock, name) for name in ("a", "b")]
    gateways = [TenantKeys(database, manual_clock, masters) for _ in range(3)]

    found = await asyncio.gather(*(one.for_writing(mine) for one in gateways))
    others = await keys.for_writing(other)

    assert len(set(found)) == 1
    assert found[0] is not None
    assert len(found[0]) == 32
    assert others not in found
    assert await keys.for_reading(mine) == found[0]


async def test_without_master_keys_nothing_is_encrypted(database: Database, manual_clock: ManualClock) -> None:
    """Without a file of master keys there is no key to write with, and no row."""
    scope = await new_tenant(database, manual_clock)
    keys = await open_tenant_keys(None, database, manual_clock)

    assert (await keys.for_writing(scope), await keys.for_reading(scope)) == (None, None)


async def test_a_start_without_the_right_master_keys_is_refused(
    database: Database, manual_clock: ManualClock, keys: TenantKeys, tmp_path: Path
) -> None:
    """If there are data keys, a start without master keys, or with others, is an error that says what to do."""
    await keys.for_writing(await new_tenant(database, manual_clock))
    right, other = tmp_path / "master.key", tmp_path / "other.key"
    MasterKeyFile.create(other)
    forged = json.loads(right.read_text())
    forged["keys"] = dict.fromkeys(forged["keys"], next(iter(json.loads(other.read_text())["keys"].values())))
    (tmp_path / "forged.key").write_text(json.dumps(forged))
    (tmp_path / "forged.key").chmod(0o600)

    await open_tenant_keys(right, database, manual_clock)
    for path, told in (
        (None, "GRAFTWORK_MASTER_KEY_FILE"),
        (other, "lacks the master key"),
        (tmp_path / "forged.key", "not the one"),
        (tmp_path / "nowhere", "cannot be read"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            await open_tenant_keys(path, database, manual_clock)


async def test_a_rotation_changes_the_wrapping_alone(
    database: Database, manual_clock: ManualClock, keys: TenantKeys, tmp_path: Path
) -> None:
    """After a rotation and a rewrap, all data keys are the same, no row needs the old master key, and a gateway that runs
    with the old file goes on.
    """
    scopes = [await new_tenant(database, manual_clock, name) for name in ("a", "b")]
    before = [await keys.for_writing(scope) for scope in scopes]
    rotated = MasterKeyFile.load(tmp_path / "master.key")
    old_id, new_id = rotated.current_id, rotated.rotate()

    number = await TenantKeys(database, manual_clock, rotated).rewrap()

    assert (number, await TenantKeys(database, manual_clock, rotated).rewrap()) == (2, 0)
    async with database.read() as session:
        masters = set((await session.execute(text("SELECT master_id FROM data_keys"))).scalars())
    assert (masters, old_id != new_id) == ({new_id}, True)
    assert [await keys.for_reading(scope) for scope in scopes] == before
    assert await keys.for_writing(await new_tenant(database, manual_clock, "c")) is not None
    assert MasterKeyFile.load(tmp_path / "master.key").key_ids == (old_id, new_id)


async def test_a_file_that_is_lost_while_serving_is_a_503(
    database: Database, manual_clock: ManualClock, keys: TenantKeys, tmp_path: Path
) -> None:
    """If the file of master keys is gone, a known data key works on, and a new tenant gets an error to retry after."""
    scope, other = [await new_tenant(database, manual_clock, name) for name in ("a", "b")]
    known = await keys.for_writing(scope)
    (tmp_path / "master.key").unlink()

    assert await keys.for_writing(scope) == known
    with pytest.raises(Unavailable) as refused:
        await keys.for_writing(other)
    assert refused.value.should_retry


async def test_a_destroyed_key_is_gone(database: Database, manual_clock: ManualClock, keys: TenantKeys) -> None:
    """An erased tenant's key is gone from the database and from memory, and a deleted tenant gets no new one."""
    scope = await new_tenant(database, manual_clock)
    assert await keys.for_writing(scope) is not None
    await Tenancy(database, b"pepper", manual_clock).delete_tenant(scope)

    assert await keys.destroy(scope)

    assert await keys.for_reading(scope) is None
    with pytest.raises(NotPermitted):
        await keys.for_writing(scope)
    async with database.read() as session:
        assert (await session.execute(text("SELECT count(*) FROM data_keys"))).scalar_one() == 0
