"""Tests of the keys that encrypt rows: when they are made, remembered and forgotten, on both databases."""

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from graftwork.platform.clock import ManualClock
from graftwork.platform.contents.columns import is_sealed
from graftwork.platform.contents.rows import row_opener, row_sealer
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.row_keys import REMEMBERED_S
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.errors import InternalFailure, NotPermitted, Unavailable
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.store.tables import ItemRow
from tests.encrypted_rows import with_encrypted_rows
from tests.platform.encryption.test_tenant_keys import new_tenant

BODY = {"text": "said"}


@pytest.fixture
def keys(database: Database, tmp_path: Path, manual_clock: ManualClock) -> TenantKeys:
    return with_encrypted_rows(database, tmp_path, manual_clock)


async def sealed(database: Database, scope: TenantScope) -> Any:
    async with database.write() as session:
        return (await row_sealer(session, scope)).sealed(ItemRow, {"body": BODY}, "item_1")["body"]


async def sealed_and_rolled_back(database: Database, scope: TenantScope) -> Any:
    """Encrypts twice and decrypts in one transaction, which is then rolled back."""
    with suppress(ZeroDivisionError):
        async with database.write() as session:
            for _ in range(2):
                lost = (await row_sealer(session, scope)).sealed(ItemRow, {"body": BODY}, "item_1")["body"]
            assert (await row_opener(session, scope)).opened(ItemRow, "body", lost, "item_1") == BODY
            raise ZeroDivisionError
    return lost


async def opened(database: Database, scope: TenantScope, stored: Any) -> Any:
    async with database.read() as session:
        return (await row_opener(session, scope)).opened(ItemRow, "body", stored, "item_1")


async def num_keys(database: Database) -> int:
    async with database.read() as session:
        return int((await session.execute(text("SELECT count(*) FROM data_keys"))).scalar_one())


async def test_the_first_content_makes_the_key(database: Database, manual_clock: ManualClock, keys: TenantKeys) -> None:
    """A tenant's first content makes its data key, in the same transaction; a reader makes none."""
    scope = await new_tenant(database, manual_clock)

    assert await opened(database, scope, BODY) == BODY
    assert await num_keys(database) == 0
    stored = await sealed(database, scope)
    assert is_sealed(stored)
    assert await opened(database, scope, stored) == BODY
    assert await num_keys(database) == 1


async def test_a_key_that_was_rolled_back_is_never_used_again(
    database: Database, manual_clock: ManualClock, keys: TenantKeys
) -> None:
    """If the transaction that made a key fails, the next one makes another, which the database has."""
    scope = await new_tenant(database, manual_clock)

    lost = await sealed_and_rolled_back(database, scope)
    assert await num_keys(database) == 0
    stored = await sealed(database, scope)

    assert await opened(database, scope, stored) == BODY
    with pytest.raises(InternalFailure):
        await opened(database, scope, lost)


async def test_processes_that_are_first_at_once_use_one_key(
    database: Database, database_url: str, tmp_path: Path, manual_clock: ManualClock, keys: TenantKeys
) -> None:
    """Of several processes that store a tenant's first content at the same time, each reads what the others stored."""
    scope = await new_tenant(database, manual_clock)
    others = [Database(database_url) for _ in range(3)]
    for other in others:
        with_encrypted_rows(other, tmp_path, manual_clock)

    stored = await asyncio.gather(*(sealed(each, scope) for each in [database, *others]))

    assert await num_keys(database) == 1
    for each in [database, *others]:
        assert [await opened(each, scope, one) for one in stored] == [BODY] * 4
    for other in others:
        await other.close()


async def test_a_destroyed_key_opens_nothing(
    database: Database, database_url: str, tmp_path: Path, manual_clock: ManualClock, keys: TenantKeys
) -> None:
    """The process that destroys a key has forgotten it at once, and others after a minute; none makes another one for a
    deleted tenant.
    """
    scope = await new_tenant(database, manual_clock)
    stored = await sealed(database, scope)
    other = Database(database_url)
    with_encrypted_rows(other, tmp_path, manual_clock)
    assert [await opened(each, scope, stored) for each in (database, other)] == [BODY, BODY]
    async with database.write() as session:
        await session.execute(text("UPDATE tenants SET status = 'deleted'"))

    await keys.destroy(scope)

    with pytest.raises(InternalFailure, match="erased tenant"):
        await opened(database, scope, stored)
    assert await opened(other, scope, stored) == BODY
    manual_clock.advance(REMEMBERED_S)
    for each in (database, other):
        with pytest.raises(InternalFailure, match="erased tenant"):
            await opened(each, scope, stored)
        with pytest.raises(NotPermitted):
            await sealed(each, scope)
    await other.close()


async def test_a_rotation_leaves_rows_alone(
    database: Database, tmp_path: Path, manual_clock: ManualClock, keys: TenantKeys
) -> None:
    """After a rotation and a rewrap, what was stored before is opened as it is; also without the older master key."""
    scope = await new_tenant(database, manual_clock)
    stored = await sealed(database, scope)

    path = tmp_path / "master.key"
    new_id = MasterKeyFile.load(path).rotate()
    assert await with_encrypted_rows(database, tmp_path, manual_clock).rewrap() == 1
    rotated = json.loads(path.read_text())
    path.write_text(json.dumps(rotated | {"keys": {new_id: rotated["keys"][new_id]}}))
    with_encrypted_rows(database, tmp_path, manual_clock)

    assert await opened(database, scope, stored) == BODY


async def test_a_lost_master_key_is_no_answer(
    database: Database, tmp_path: Path, manual_clock: ManualClock, keys: TenantKeys
) -> None:
    """With the master keys of another server nothing is opened and nothing stored: the error names the operator."""
    scope = await new_tenant(database, manual_clock)
    stored = await sealed(database, scope)
    (tmp_path / "master.key").unlink()
    with_encrypted_rows(database, tmp_path, manual_clock)

    with pytest.raises(Unavailable, match="operator"):
        await opened(database, scope, stored)
    with pytest.raises(Unavailable, match="operator"):
        await sealed(database, scope)


async def test_whole_writes_wait_for_no_key_that_is_known(
    sqlite_database: Database, tmp_path: Path, manual_clock: ManualClock
) -> None:
    """On a SQLite file, a tenant's content is encrypted on the thread of whole writes; only to find its key, about once a
    minute, a write begins again on the event loop's thread."""
    keys = with_encrypted_rows(sqlite_database, tmp_path, manual_clock)
    scope, here = await new_tenant(sqlite_database, manual_clock), threading.current_thread()
    on_loop = list[bool]()

    async def write() -> Any:
        async def work(session: WriteSession) -> Any:
            sealer = await row_sealer(session, scope)
            on_loop.append(threading.current_thread() is here)
            return sealer.sealed(ItemRow, {"body": BODY}, "item_1")["body"]

        return await sqlite_database.write_whole(work)

    stored = [await write()]  # makes the key
    stored += [await write() for _ in range(3)]  # the first of them reads it
    manual_clock.advance(REMEMBERED_S)
    stored += [await write() for _ in range(2)]
    await keys.destroy(scope)

    assert on_loop == [True, True, False, False, True, False]
    with pytest.raises(InternalFailure):
        await opened(sqlite_database, scope, stored[0])


async def test_a_whole_write_uses_no_destroyed_key(
    sqlite_database: Database, tmp_path: Path, manual_clock: ManualClock
) -> None:
    """After a tenant's key was destroyed, a whole write encrypts nothing with it, though it was just known."""
    keys = with_encrypted_rows(sqlite_database, tmp_path, manual_clock)
    scope = await new_tenant(sqlite_database, manual_clock)

    async def work(session: WriteSession) -> Any:
        return (await row_sealer(session, scope)).sealed(ItemRow, {"body": BODY}, "item_1")["body"]

    old = [await sqlite_database.write_whole(work) for _ in range(3)][-1]
    await keys.destroy(scope)
    new = await sqlite_database.write_whole(work)

    assert await opened(sqlite_database, scope, new) == BODY
    with pytest.raises(InternalFailure):
        await opened(sqlite_database, scope, old)
