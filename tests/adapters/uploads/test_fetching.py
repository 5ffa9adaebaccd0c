"""Tests of fetches in the background: what they make, how they fail, and what a restart does to them."""

import asyncio
from dataclasses import replace

import pytest

from graftwork.adapters.sources.source import CONFIG_FILE, WEIGHTS_FILE
from graftwork.adapters.uploads.fetching import MAX_ATTEMPTS
from graftwork.adapters.uploads.pending_upload import UploadStatus
from graftwork.platform.errors import NotFound, NotPermitted, Unavailable, ValidationFailed
from tests.adapters.adapter_files import config_bytes
from tests.adapters.registry.two_tenants import FILES, TwoTenants
from tests.adapters.uploads.two_uploaders import COMMIT, LEASE_S, LIMITS, TwoUploaders, digest, settled


async def test_a_fetch_makes_a_version(uploaders: TwoUploaders) -> None:
    """The files of a source become a version that says whence it came, at which commit; both acts are audited."""
    upload = await uploaders.fetch()
    await settled(uploaders.runner())

    ended = await uploaders.get(upload)
    (version,) = (await uploaders.tenants.registry.get(uploaders.a, "bot")).versions
    assert (upload.status, ended.status, ended.version) == (UploadStatus.FETCHING, UploadStatus.READY, 1)
    assert version.provenance.source == f"hf:acme/lora@{COMMIT}"
    assert version.provenance.pushed_by == "key_1"
    assert uploaders.source.opened == [
        f"hf:acme/lora@v1/{CONFIG_FILE}",
        f"hf:acme/lora@{COMMIT}/{WEIGHTS_FILE}",
    ], "the weights are of the commit of the configuration"
    assert uploaders.staged() == set()
    actions = [action for _, action, _, _ in await uploaders.tenants.audited()]
    assert actions == ["adapter.fetch.requested", "adapter.uploaded"]


async def test_what_is_not_as_expected_is_a_stated_refusal(uploaders: TwoUploaders) -> None:
    """A missing file, a wrong digest, too many bytes and a wrong tensor each fail the fetch with their reason."""
    runner, right = uploaders.runner(), uploaders.source.files
    cases: list[tuple[dict[str, bytes], str | None, str]] = [
        ({WEIGHTS_FILE: right[WEIGHTS_FILE]}, None, "source_refused"),
        (right, "sha256:" + "0" * 64, "digest_mismatch"),
        (right | {WEIGHTS_FILE: bytes(LIMITS.max_bytes + 1)}, None, "source_refused"),
        (right | {CONFIG_FILE: b" " * (2**20 + 1)}, None, "source_refused"),
        (right | {CONFIG_FILE: config_bytes(target_modules=["q_proj"])}, None, "validation_failed"),
        (right | {WEIGHTS_FILE: b"PK" + bytes(100)}, None, "unsupported_format"),
    ]
    for files, wanted, code in cases:
        for uploaders.source.says_size in (True, False):
            uploaders.source.files = files
            upload = await uploaders.fetch(digest=wanted)
            await settled(runner)

            ended = await uploaders.get(upload)
            assert (ended.status, ended.error and ended.error["code"]) == (UploadStatus.FAILED, code), ended.error
            assert uploaders.staged() == set()
    with pytest.raises(NotFound):
        await uploaders.tenants.registry.get(uploaders.a, "bot")
    assert (await uploaders.tenants.audited())[-1][1] == "adapter.fetch.refused"


async def test_the_right_digest_is_of_all_files(uploaders: TwoUploaders) -> None:
    """The digest is that of the configuration and the weights, one after the other."""
    upload = await uploaders.fetch(text="https://files.test/a", digest=digest(config_bytes(), FILES[0]))
    await settled(uploaders.runner())

    assert (await uploaders.get(upload)).version == 1


async def test_sources_that_are_not_allowed(uploaders: TwoUploaders) -> None:
    """A bucket that no rule names is refused at once, and so is a web server without a digest."""
    with pytest.raises(NotPermitted) as refusal:
        await uploaders.fetch(text="s3://models/a")
    with pytest.raises(ValidationFailed) as unpinned:
        await uploaders.fetch(text="https://files.test/a")

    assert (refusal.value.code, unpinned.value.code) == ("source_not_allowed", "digest_required")


async def test_a_source_that_is_away_is_tried_again(uploaders: TwoUploaders) -> None:
    """A fetch waits longer before each attempt, and succeeds if the source answers, or fails after the last one."""
    runner = uploaders.runner()
    uploaders.source.failure = Unavailable("away", code="source_unavailable")
    upload = await uploaders.fetch()
    lost = await uploaders.fetch("lost")
    await settled(runner)
    await settled(runner)  # too early
    assert len(uploaders.source.opened) == 2
    uploaders.clock.advance(11)
    await settled(runner)
    assert len(uploaders.source.opened) == 4
    await uploaders.keeper.cancel(uploaders.a, upload.id)
    uploaders.clock.advance(21)
    await settled(runner)

    failed = await uploaders.get(lost)
    assert (failed.status, failed.attempts) == (UploadStatus.FAILED, MAX_ATTEMPTS)
    assert failed.error is not None
    assert failed.error["code"] == "source_unavailable"
    uploaders.source.failure = None
    again = await uploaders.fetch("lost")
    await settled(runner)
    assert (await uploaders.get(again)).version == 1


async def test_a_slow_source_is_given_up(two_tenants: TwoTenants) -> None:
    """A source that does not send its files in time fails the fetch, and nothing of it stays on the disk."""
    uploaders = TwoUploaders(two_tenants, replace(LIMITS, fetch_s=0.05))
    uploaders.source.gate = asyncio.Event()
    upload = await uploaders.fetch()
    await settled(uploaders.runner())

    ended = await uploaders.get(upload)
    assert ended.error is not None
    assert ended.error["code"] == "fetch_timeout"
    assert uploaders.staged() == set()


async def test_a_restart_begins_the_fetch_anew(uploaders: TwoUploaders) -> None:
    """A gateway that stops in the middle gives the fetch back, and the next one fetches it whole."""
    uploaders.source.gate = asyncio.Event()
    first = uploaders.runner("g1")
    upload = await uploaders.fetch()
    await first.tick()
    await uploaders.source.half_sent.wait()
    await first.close()
    uploaders.source.gate = None

    await settled(uploaders.runner("g2"))

    ended = await uploaders.get(upload)
    assert (ended.version, ended.attempts) == (1, 2)
    (version,) = (await uploaders.tenants.registry.get(uploaders.a, "bot")).versions
    assert uploaders.tenants.store.open(version.digest).weights.read_bytes() == FILES[0]


async def test_a_gateway_that_dies_loses_its_lease(uploaders: TwoUploaders) -> None:
    """While a lease holds, no other gateway begins; after its end another does, and the first changes nothing more."""
    uploaders.source.gate = gate = asyncio.Event()
    dead, other = uploaders.runner("dead"), uploaders.runner("other")
    upload = await uploaders.fetch()
    await dead.tick()
    await uploaders.source.half_sent.wait()
    await other.tick()
    assert other.running == ()
    uploaders.clock.advance(LEASE_S + 1)
    uploaders.source.gate = None
    uploaders.source.failure = ValidationFailed("gone", code="source_refused")

    await settled(other)
    gate.set()
    await asyncio.gather(*dead.running, return_exceptions=True)

    ended = await uploaders.get(upload)
    assert (ended.status, ended.attempts) == (UploadStatus.FAILED, 2)
    with pytest.raises(NotFound):
        await uploaders.tenants.registry.get(uploaders.a, "bot")


async def test_a_fetch_that_kills_its_gateways_ends(uploaders: TwoUploaders) -> None:
    """After so many gateways have stopped in the middle of a fetch, it has failed, and says so."""
    upload = await uploaders.fetch()
    uploaders.source.gate = asyncio.Event()
    for number in range(MAX_ATTEMPTS):
        uploaders.source.half_sent.clear()
        dead = uploaders.runner(f"dead-{number}")
        await dead.tick()
        await uploaders.source.half_sent.wait()
        for task in dead.running:
            task.cancel()
        await asyncio.gather(*dead.running, return_exceptions=True)
        uploaders.clock.advance(LEASE_S + 1)

    await settled(uploaders.runner("last"))

    ended = await uploaders.get(upload)
    assert ended.error is not None
    assert ended.error["code"] == "fetch_interrupted"


async def test_a_cancelled_fetch_stops(uploaders: TwoUploaders) -> None:
    """A client that cancels a fetch ends it at the next tick, and it makes no version."""
    uploaders.source.gate = asyncio.Event()
    runner = uploaders.runner()
    upload = await uploaders.fetch()
    await runner.tick()
    await uploaders.source.half_sent.wait()
    await uploaders.keeper.cancel(uploaders.a, upload.id)
    (task,) = runner.running

    await runner.tick()
    await asyncio.gather(task, return_exceptions=True)

    assert task.cancelled()
    with pytest.raises(NotFound):
        await uploaders.tenants.registry.get(uploaders.a, "bot")
