"""Tests of the registry on both databases: which files stay, and which the engine has tried."""

import asyncio
import threading
from pathlib import Path

import pytest

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.platform.errors import (
    GraftworkError,
    NotFound,
    Unavailable,
    ValidationFailed,
)
from graftwork.platform.tenancy.principals import TenantScope
from tests.adapters.adapter_files import DESCRIPTION, config_bytes, open_files
from tests.adapters.registry.two_tenants import FILES, NO_LIMITS, TwoTenants


async def test_two_names_and_two_tenants_share_one_artifact(two_tenants: TwoTenants) -> None:
    """Uploads of the same adapter under other names or by other tenants share one artifact."""
    one = await two_tenants.publish("one")
    two = await two_tenants.publish("two")
    three = await two_tenants.publish("three", scope=two_tenants.b)

    digests = {adapter.versions[0].digest for adapter in (one, two, three)}
    assert two_tenants.stored == digests
    assert len(digests) == 1


async def test_files_go_with_the_last_version_of_any_tenant(two_tenants: TwoTenants) -> None:
    """The files of an artifact are deleted with its last version, after the engine is told once."""
    for name, scope in (("one", two_tenants.a), ("two", two_tenants.a), ("one", two_tenants.b)):
        adapter = await two_tenants.publish(name, scope=scope)
    digest = adapter.versions[0].digest

    freed = [
        await two_tenants.registry.deletions.delete(two_tenants.a, "one"),
        await two_tenants.registry.deletions.delete_version(two_tenants.a, "two", 1),
        await two_tenants.registry.deletions.delete(two_tenants.b, "one"),
    ]

    assert freed == [(), (), (digest,)]
    assert two_tenants.stored == set()
    assert two_tenants.forgotten == [digest]


async def test_a_refused_upload_leaves_nothing(two_tenants: TwoTenants, tmp_path: Path) -> None:
    """A refused upload leaves no row and no file."""
    bad = [
        ("bot", config_bytes(), FILES[0][:-1]),
        ("bot", config_bytes(r=8), FILES[0]),
        ("bot", b"{", FILES[0]),
        ("../bot", config_bytes(), FILES[0]),
        ("tiny", config_bytes(), FILES[0]),
        ("bot", config_bytes(), b"PK\x03\x04" + bytes(50)),
    ]

    for name, config, weights in bad:
        with pytest.raises(ValidationFailed), open_files(config, weights) as files:
            await two_tenants.registry.publish(two_tenants.a, name, files, DESCRIPTION, NO_LIMITS)

    assert (await two_tenants.registry.list(two_tenants.a)).items == ()
    assert two_tenants.stored == set()
    assert await two_tenants.registry.sweep() == ()


async def test_whoever_has_a_version_has_its_files_while_others_delete_the_same(two_tenants: TwoTenants) -> None:
    """While two tenants publish and delete the same bytes, every remaining version can be loaded."""

    async def churn(scope: TenantScope) -> None:
        for _ in range(4):
            await two_tenants.publish(scope=scope)
            await two_tenants.registry.deletions.delete(scope, "bot")
        await two_tenants.publish(scope=scope)

    await asyncio.gather(churn(two_tenants.a), churn(two_tenants.b))

    (digest,) = two_tenants.stored
    assert ArtifactAdapterSource(LocalArtifacts(two_tenants.root), DESCRIPTION).load(digest).max_rank == 4
    assert await two_tenants.registry.sweep() == ()


async def test_files_that_another_freed_during_an_upload_are_written_again(
    two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another tenant's delete removes during an upload are written again."""
    put, delete = two_tenants.store.put, two_tenants.store.delete
    digests: list[str] = []

    def put_then_lose(digest: str, files: AdapterFiles) -> None:
        put(digest, files)
        if not digests:
            delete(digest)
        digests.append(digest)

    monkeypatch.setattr(two_tenants.store, "put", put_then_lose)

    adapter = await two_tenants.publish()

    assert digests == [adapter.versions[0].digest] * 2
    assert two_tenants.probed == [adapter.versions[0].digest]
    assert two_tenants.stored == {adapter.versions[0].digest}


async def test_a_store_that_fails_leaves_no_rows(two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store cannot write the files, no row is stored."""

    def full(_digest: str, _files: AdapterFiles) -> None:
        raise Unavailable("No space left on device")

    monkeypatch.setattr(two_tenants.store, "put", full)

    with pytest.raises(Unavailable, match="No space"):
        await two_tenants.publish()

    assert (await two_tenants.registry.list(two_tenants.a)).items == ()
    assert await two_tenants.registry.sweep() == ()


async def test_an_upload_cancelled_while_its_files_are_written_leaves_nothing(
    two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled upload waits for its writer and leaves no file."""
    begun, go_on = threading.Event(), threading.Event()
    put = two_tenants.store.put

    def slow(digest: str, files: AdapterFiles) -> None:
        begun.set()
        assert go_on.wait(60)
        put(digest, files)

    monkeypatch.setattr(two_tenants.store, "put", slow)

    upload = asyncio.create_task(two_tenants.publish())
    await asyncio.to_thread(begun.wait, 60)
    upload.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    is_over = upload.done()
    go_on.set()
    assert not is_over
    with pytest.raises(asyncio.CancelledError):
        await upload

    assert two_tenants.stored == set()
    assert await two_tenants.registry.sweep() == ()


async def test_sweep_removes_what_a_crash_left_behind(two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep removes exactly the files that no version uses."""
    kept = await two_tenants.publish("kept", seed=0)
    lost = await two_tenants.publish("lost", seed=1)

    def crash(_digest: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(two_tenants.store, "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            await two_tenants.registry.deletions.delete(two_tenants.a, "lost")
    assert len(two_tenants.stored) == 2

    assert await two_tenants.registry.sweep() == (lost.versions[0].digest,)
    assert two_tenants.stored == {kept.versions[0].digest}


async def test_an_engine_that_is_gone_does_not_keep_an_adapter_from_being_deleted(two_tenants: TwoTenants) -> None:
    """An adapter can be deleted while the engine is away."""

    async def gone(_digest: str) -> None:
        raise Unavailable("no engine answers")

    registry = AdapterRegistry(two_tenants.database, two_tenants.store, two_tenants.inspector, before_free=gone)
    await two_tenants.publish()

    assert len(await registry.deletions.delete(two_tenants.a, "bot")) == 1
    assert two_tenants.stored == set()


async def test_a_version_is_there_only_once_the_engine_has_tried_it(two_tenants: TwoTenants) -> None:
    """The engine tries new weights once before their version is stored, for all names and tenants."""
    (version,) = (await two_tenants.publish("one")).versions
    await two_tenants.publish("two")
    await two_tenants.publish("three", scope=two_tenants.b)
    await two_tenants.publish("one", seed=1)

    assert two_tenants.probed[0] == version.digest
    assert len(two_tenants.probed) == len(set(two_tenants.probed)) == 2


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (ValidationFailed("the probe differs"), ValidationFailed),
        (Unavailable("no engine"), Unavailable),
        (NotFound("no such artifact"), Unavailable),
    ],
)
async def test_what_the_engine_cannot_serve_is_not_stored(
    two_tenants: TwoTenants, refusal: GraftworkError, expected: type[GraftworkError]
) -> None:
    """An adapter that the engine refuses is not stored; the client gets the reason and may try again."""
    two_tenants.probe_refusal = refusal
    with pytest.raises(expected):
        await two_tenants.publish()

    assert two_tenants.stored == set()
    assert await two_tenants.registry.model_names(two_tenants.a) == ()
    assert await two_tenants.registry.sweep() == ()
    two_tenants.probe_refusal = None
    tries = len(two_tenants.probed)
    assert (await two_tenants.publish()).versions[0].version == 1
    assert len(two_tenants.probed) == tries + 1


async def test_a_failed_try_leaves_what_others_have(two_tenants: TwoTenants) -> None:
    """A failed try keeps the files that another tenant's version needs, and does not try them again."""
    made = await two_tenants.publish(scope=two_tenants.b)
    two_tenants.probe_refusal = ValidationFailed("the probe differs")

    again = await two_tenants.publish()

    assert again.versions[0].digest == made.versions[0].digest
    assert len(two_tenants.probed) == 1
