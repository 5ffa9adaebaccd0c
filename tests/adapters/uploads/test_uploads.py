"""Tests of uploads in parts: offsets, limits, ends, and what is left of them."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.adapters.uploads import repository
from graftwork.adapters.uploads.pending_upload import UploadStatus
from graftwork.platform.errors import (
    BudgetSpent,
    CapacityContended,
    Conflict,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
    ValidationFailed,
)
from graftwork.platform.quotas.quota import Quota
from tests.adapters.adapter_files import config_bytes
from tests.adapters.registry.two_tenants import BYTES, FILES, TwoTenants
from tests.adapters.uploads.two_uploaders import LIMITS, TwoUploaders, chunks, digest


async def test_parts_make_a_version(uploaders: TwoUploaders) -> None:
    """Weights that come in parts become a version with the bytes that were sent, and its pusher; then they are gone."""
    upload = await uploaders.create()
    middle = await uploaders.append(upload, 0, FILES[0][:100], FILES[0][100:1000])
    await uploaders.append(upload, middle, FILES[0][1000:])

    ended = await uploaders.complete(upload)

    adapter = await uploaders.tenants.registry.get(uploaders.a, "bot")
    assert (ended.status, ended.version, middle) == (UploadStatus.READY, 1, 1000)
    stored = uploaders.tenants.store.open(adapter.versions[0].digest)
    assert (stored.weights.read_bytes(), stored.config.read_bytes()) == (FILES[0], config_bytes())
    assert adapter.versions[0].provenance.pushed_by == "key_1"
    assert uploaders.staged() == set()
    assert await uploaders.complete(upload) == await uploaders.get(upload)  # the answer may have been lost


async def test_a_cut_connection_goes_on_at_the_offset(uploaders: TwoUploaders) -> None:
    """What came before the connection broke stays, and a part for another offset is refused with the right one."""
    upload = await uploaders.create()
    broken = chunks(FILES[0][:700], then=ConnectionResetError)
    with pytest.raises(ConnectionResetError):
        await uploaders.keeper.append(uploaders.a, upload.id, 0, broken)

    with pytest.raises(Conflict) as wrong:
        await uploaders.append(upload, 0, FILES[0])
    await uploaders.append(upload, 700, FILES[0][700:])

    assert (wrong.value.code, wrong.value.details) == ("wrong_offset", {"offset": 700})
    assert await uploaders.keeper.received(upload) == BYTES
    assert (await uploaders.complete(upload)).version == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(1, BYTES), st.booleans()), max_size=8))
async def test_any_cuts_give_the_same_bytes(uploaders: TwoUploaders, cuts: list[tuple[int, bool]]) -> None:
    """However an upload is cut into parts, and whichever of them break, the staged bytes are the beginning of the file."""
    upload = await uploaders.create()
    offset = 0
    for length, breaks in cuts:
        piece = FILES[0][offset : offset + length]
        part = chunks(piece, then=ConnectionResetError if breaks else None)
        with pytest.raises(ConnectionResetError) if breaks else _no_error():
            await uploaders.keeper.append(uploaders.a, upload.id, offset, part)
        offset += len(piece)

    assert await uploaders.keeper.received(upload) == offset
    with uploaders.staging.reading(upload) as file:
        assert file.read() == FILES[0][:offset]
    await uploaders.keeper.cancel(uploaders.a, upload.id)


class _no_error:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


async def test_an_upload_is_cut_off_at_its_length(uploaders: TwoUploaders) -> None:
    """Bytes above the announced length are a 413, and so is an announced length above the limit."""
    upload = await uploaders.create()
    with pytest.raises(PayloadTooLarge):
        await uploaders.append(upload, 0, FILES[0], b"x")
    with pytest.raises(PayloadTooLarge):
        await uploaders.create("big", size_bytes=LIMITS.max_bytes + 1)

    assert await uploaders.keeper.received(upload) == BYTES


async def test_a_silent_client_is_given_up(uploaders: TwoUploaders) -> None:
    """A part of which no byte comes for a while is a 408 that says where to go on."""
    quick = TwoUploaders(uploaders.tenants, replace(LIMITS, idle_s=0.01))
    upload = await quick.create()

    async def silent() -> AsyncIterator[bytes]:
        yield FILES[0][:10]
        await asyncio.Event().wait()

    with pytest.raises(RequestTimeout, match="go on at offset 10") as late:
        await quick.keeper.append(quick.a, upload.id, 0, silent())

    assert late.value.details == {"offset": 10}
    assert await quick.append(upload, 10, FILES[0][10:]) == BYTES


async def test_one_request_writes_at_a_time(uploaders: TwoUploaders) -> None:
    """While one part arrives, a second request for the upload is a 409 that may be sent again."""
    upload, begun, go_on = await uploaders.create(), asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield FILES[0][:10]
        begun.set()
        await go_on.wait()

    first = asyncio.create_task(uploaders.keeper.append(uploaders.a, upload.id, 0, slow()))
    await begun.wait()
    for second in (uploaders.append(upload, 0, b"x"), uploaders.complete(upload)):
        with pytest.raises(Conflict) as busy:
            await second
        assert (busy.value.code, busy.value.should_retry) == ("upload_busy", True)
    go_on.set()

    assert await first == 10


async def test_a_missing_part_and_a_wrong_digest(uploaders: TwoUploaders) -> None:
    """An upload that lacks bytes is not completed; one whose bytes have another digest has failed, and says why."""
    upload = await uploaders.create()
    await uploaders.append(upload, 0, FILES[0][:-1])
    with pytest.raises(Conflict) as early:
        await uploaders.complete(upload)
    await uploaders.append(upload, BYTES - 1, b"\x00" if FILES[0][-1] else b"\x01")
    with pytest.raises(ValidationFailed) as wrong:
        await uploaders.complete(upload)

    failed = await uploaders.get(upload)
    assert (early.value.code, wrong.value.code) == ("upload_incomplete", "digest_mismatch")
    assert (failed.status, failed.error and failed.error["code"]) == (UploadStatus.FAILED, "digest_mismatch")
    assert uploaders.staged() == set()
    with pytest.raises(Conflict):
        await uploaders.append(upload, 0, FILES[0])


async def test_what_the_inspection_refuses_has_failed(uploaders: TwoUploaders) -> None:
    """A wrong tensor is named as for any other upload, and the adapter does not exist."""
    config = config_bytes(target_modules=["q_proj"])
    upload = await uploaders.create(config=config, digest=digest(config, FILES[0]))
    await uploaders.append(upload, 0, FILES[0])

    with pytest.raises(ValidationFailed) as refusal:
        await uploaders.complete(upload)

    assert (await uploaders.get(upload)).error == {
        "code": refusal.value.code,
        "message": refusal.value.message,
        "param": refusal.value.param,
    }
    with pytest.raises(NotFound):
        await uploaders.tenants.registry.get(uploaders.a, "bot")


async def test_an_engine_that_is_away_costs_nothing(uploaders: TwoUploaders) -> None:
    """If the engine cannot try the adapter now, the upload keeps its bytes, and can be completed later."""
    upload = await uploaders.create()
    await uploaders.append(upload, 0, FILES[0])
    uploaders.tenants.probe_refusal = Unavailable("The engine is away.")
    with pytest.raises(Unavailable):
        await uploaders.complete(upload)
    uploaders.tenants.probe_refusal = None

    assert (await uploaders.complete(upload)).version == 1


async def test_of_two_uploads_of_one_name_one_wins(uploaders: TwoUploaders) -> None:
    """Of two uploads that were begun together, the first that is completed wins, and the other is a 409."""
    first, second = await uploaders.create(seed=0), await uploaders.create(seed=1)
    await uploaders.append(first, 0, FILES[0])
    await uploaders.append(second, 0, FILES[1])

    await uploaders.complete(second)
    with pytest.raises(Conflict) as lost:
        await uploaders.complete(first)

    assert lost.value.code == "concurrent_upload"
    assert [version.version for version in (await uploaders.tenants.registry.get(uploaders.a, "bot")).versions] == [1]


async def test_open_uploads_are_limited(uploaders: TwoUploaders) -> None:
    """A tenant has so many open uploads, and no more; another tenant is not concerned, and an ended one frees its place."""
    made = [await uploaders.create(f"bot-{number}") for number in range(LIMITS.max_open)]
    with pytest.raises(CapacityContended):
        await uploaders.create("more")
    with pytest.raises(CapacityContended):
        await uploaders.fetch("more")
    await uploaders.create("more", scope=uploaders.b)
    await uploaders.keeper.cancel(uploaders.a, made[0].id)

    assert (await uploaders.create("more")).is_open


async def test_uploads_count_in_the_quota_when_they_begin(uploaders: TwoUploaders) -> None:
    """Bytes that are announced count, so two uploads that fit alone do not fit together."""
    quota = Quota(max_adapter_bytes=BYTES + 10)
    await uploaders.create("one", quota=quota)

    with pytest.raises(BudgetSpent):
        await uploaders.create("two", quota=quota)
    assert (await uploaders.create("two", scope=uploaders.b, quota=quota)).is_open


async def test_all_uploads_together_have_limited_room(two_tenants: TwoTenants) -> None:
    """When the open uploads of all tenants would take more than the server has for them, one more is a 503."""
    uploaders = TwoUploaders(two_tenants, replace(LIMITS, max_staged_bytes=2 * BYTES))
    await uploaders.create("one")
    await uploaders.create("two", scope=uploaders.b)

    with pytest.raises(Unavailable) as full:
        await uploaders.create("three")
    assert full.value.code == "too_many_uploads"


async def test_uploads_expire(uploaders: TwoUploaders) -> None:
    """An upload that was left alone is not found any more, and the sweep removes its row and its bytes."""
    old = await uploaders.create("old")
    await uploaders.append(old, 0, FILES[0][:50])
    uploaders.clock.advance(LIMITS.lives_s / 2)
    young = await uploaders.create("young")
    uploaders.clock.advance(LIMITS.lives_s / 2 + 1)
    with pytest.raises(NotFound):
        await uploaders.get(old)

    assert await uploaders.keeper.sweep() == 1

    assert uploaders.staged() == {young.id}
    assert (await uploaders.get(young)).is_open


async def test_tenants_do_not_see_each_other(uploaders: TwoUploaders) -> None:
    """Another tenant's upload is not found, by whatever call; an erased tenant keeps none."""
    upload = await uploaders.create()
    theirs = await uploaders.create(scope=uploaders.b)
    keeper, known = uploaders.keeper, (uploaders.b, upload.id)
    for call in (
        keeper.get(*known),
        keeper.append(*known, 0, chunks(b"x")),
        keeper.complete(*known, Quota()),
        keeper.cancel(*known),
    ):
        with pytest.raises(NotFound):
            await call

    await keeper.erase(uploaders.a)
    assert uploaders.staged() == {theirs.id}
    with pytest.raises(NotFound):
        await uploaders.get(upload)


async def test_bytes_without_an_upload_go(uploaders: TwoUploaders) -> None:
    """Bytes that nobody has touched for a while go if no open upload has them, and stay if one has."""
    orphan, idle, fresh = [await uploaders.create(name) for name in ("orphan", "idle", "fresh")]
    now = uploaders.clock.now()
    for upload, age_s in ((orphan, 601), (idle, 601), (fresh, 1)):
        os.utime(uploaders.tenants.root / "uploads" / upload.tenant_id / upload.id / "weights", (now - age_s,) * 2)
    async with uploaders.tenants.database.write() as session:
        for upload in (orphan, fresh):
            await repository.forget(session, uploaders.a, upload.id)

    await uploaders.keeper.sweep()

    assert uploaders.staged() == {idle.id, fresh.id}
