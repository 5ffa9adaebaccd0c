"""The registry over both databases: versions, aliases, limits, isolation, and which files stay."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftwork.adapters.format.specs import Adapter, AliasTarget
from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import (
    BudgetSpent,
    Conflict,
    GraftworkError,
    NotFound,
    Unavailable,
    ValidationFailed,
)
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import add_tenant
from graftwork.platform.tenancy.tenants import Tenant, TenantStatus
from tests.adapters.adapter_files import DESCRIPTION, config_bytes, tensors, weights_bytes

NO_LIMITS = Quota()
FILES = {seed: weights_bytes(tensors(seed)) for seed in range(6)}
BYTES = len(FILES[0])


class Lab:
    """A registry, its store, and two tenants."""

    def __init__(self, database: Database, root: Path, clock: ManualClock, inspector: AdapterInspector) -> None:
        self.database = database
        self.root = root
        self.store = LocalArtifacts(root)
        self.forgotten: list[str] = []
        self.clock = clock
        self.inspector = inspector
        self.probed: list[str] = []
        self.probe_refusal: GraftworkError | None = None
        self.registry = AdapterRegistry(
            database,
            self.store,
            inspector,
            clock=clock,
            generator=random.Random(3),
            probe=self.probe,
            before_free=self.forget,
        )
        self.a = scope_of_tenant(AdminPrincipal(), TenantId("ten_a"))
        self.b = scope_of_tenant(AdminPrincipal(), TenantId("ten_b"))

    async def probe(self, digest: str) -> None:
        if not self.store.exists(digest):
            raise NotFound("The engine has no such artifact.")
        self.probed.append(digest)
        if self.probe_refusal is not None:
            raise self.probe_refusal

    async def forget(self, digest: str) -> None:
        assert self.store.exists(digest), "the engine is told before the files go"
        self.forgotten.append(digest)

    async def publish(
        self,
        name: str = "bot",
        seed: int = 0,
        scope: TenantScope | None = None,
        limits: Quota = NO_LIMITS,
        **config: Any,
    ) -> Adapter:
        return await self.registry.publish(
            scope or self.a, name, config_bytes(**config), FILES[seed], DESCRIPTION, limits
        )

    @property
    def stored(self) -> set[str]:
        """The digests that the store holds, found by looking at the disk."""
        return {f"sha256:{path.parent.name}{path.name}" for path in self.root.glob("sha256/??/*")}


@pytest.fixture
async def lab(database: Database, tmp_path: Path, manual_clock: ManualClock, inspector: AdapterInspector) -> Lab:
    async with database.write() as session:
        for name in ("ten_a", "ten_b"):
            await add_tenant(session, Tenant(TenantId(name), name, TenantStatus.ACTIVE, 1.0, "default", 0.0))
    return Lab(database, tmp_path / "artifacts", manual_clock, inspector)


async def test_a_published_adapter_is_described_stored_and_loadable(lab: Lab) -> None:
    """The answer of the upload, the answer of a later look and the engine's view agree."""
    made = await lab.publish()

    (version,) = made.versions
    assert (made.name, version.version, version.rank, version.size_bytes) == ("bot", 1, 4, BYTES)
    assert (version.target_modules, version.status) == (("q_proj", "v_proj", "down_proj"), "ready")
    assert (made.created_at, version.created_at) == (lab.clock.now(), lab.clock.now())
    assert await lab.registry.get(lab.a, "bot") == made
    assert lab.stored == {version.digest}
    assert len(ArtifactAdapterSource(lab.root, DESCRIPTION).load(version.digest).pairs) == 6


async def test_other_weights_under_a_name_make_the_next_version(lab: Lab) -> None:
    """Versions count up; each keeps its digest."""
    first = await lab.publish(seed=0)
    lab.clock.advance(60)
    second = await lab.publish(seed=1)

    assert [version.version for version in second.versions] == [1, 2]
    assert second.versions[0] == first.versions[0]
    assert second.id == first.id
    assert second.versions[1].created_at == second.created_at + 60
    assert await lab.registry.get(lab.a, "bot") == second


async def test_the_same_bytes_again_are_the_same_version(lab: Lab) -> None:
    """Also when newer versions have come, and when the limits are spent."""
    first = await lab.publish(seed=0)
    await lab.publish(seed=1)

    again = await lab.publish(seed=0, limits=Quota(max_adapters=1, max_adapter_bytes=1))

    assert [version.version for version in again.versions] == [1, 2]
    assert again.versions[0] == first.versions[0]


async def test_the_same_weights_at_another_scale_are_another_version(lab: Lab) -> None:
    """Identity is what is computed, not the weights file."""
    await lab.publish()
    adapter = await lab.publish(lora_alpha=9)

    assert len({version.digest for version in adapter.versions}) == 2


async def test_two_names_and_two_tenants_share_one_artifact(lab: Lab) -> None:
    """One digest, one pair of files, whoever uploads it."""
    one = await lab.publish("one")
    two = await lab.publish("two")
    three = await lab.publish("three", scope=lab.b)

    digests = {adapter.versions[0].digest for adapter in (one, two, three)}
    assert lab.stored == digests
    assert len(digests) == 1


async def test_files_go_with_the_last_version_of_any_tenant(lab: Lab) -> None:
    """And the engine is told just before, once."""
    for name, scope in (("one", lab.a), ("two", lab.a), ("one", lab.b)):
        adapter = await lab.publish(name, scope=scope)
    digest = adapter.versions[0].digest

    freed = [
        await lab.registry.delete(lab.a, "one"),
        await lab.registry.delete_version(lab.a, "two", 1),
        await lab.registry.delete(lab.b, "one"),
    ]

    assert freed == [(), (), (digest,)]
    assert lab.stored == set()
    assert lab.forgotten == [digest]


async def test_a_deleted_adapter_is_gone_and_its_name_is_free(lab: Lab) -> None:
    """What comes after under its name begins anew."""
    await lab.publish(seed=0)
    await lab.publish(seed=1)
    await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.to_version(1))

    freed = await lab.registry.delete(lab.a, "bot")

    assert len(freed) == 2
    for model in ("bot", "bot@1", "bot@prod"):
        with pytest.raises(NotFound):
            await lab.registry.resolve(lab.a, model, "tiny")
    again = await lab.publish(seed=2)
    assert [version.version for version in again.versions] == [1]
    assert again.aliases == {}


async def test_a_version_number_is_never_used_again(lab: Lab) -> None:
    """Who pinned name@2 must not meet other weights under it."""
    await lab.publish(seed=0)
    await lab.publish(seed=1)
    await lab.registry.delete_version(lab.a, "bot", 2)

    adapter = await lab.publish(seed=2)
    back = await lab.publish(seed=1)

    assert [version.version for version in adapter.versions] == [1, 3]
    assert [version.version for version in back.versions] == [1, 3, 4]


async def test_a_version_that_an_alias_leads_to_cannot_be_deleted(lab: Lab) -> None:
    """Not even one that a canary leads to; the error names the alias."""
    for seed in (0, 1):
        await lab.publish(seed=seed)
    await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.9, "2": 0.1}}))

    with pytest.raises(Conflict) as caught:
        await lab.registry.delete_version(lab.a, "bot", 2)

    assert caught.value.details == {"aliases": ["prod"]}
    assert len(lab.stored) == 2


async def test_resolving_a_name_prefers_prod_and_then_the_newest(lab: Lab) -> None:
    """A bare name follows the alias `prod` once there is one."""
    await lab.publish(seed=0)
    await lab.publish(seed=1)

    async def version_of(model: str) -> int | None:
        version = (await lab.registry.resolve(lab.a, model, "tiny")).version
        return version.version if version else None

    assert await version_of("bot") == 2
    await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.to_version(1))
    await lab.registry.set_alias(lab.a, "bot", "next", AliasTarget.to_version(2))
    assert [await version_of(model) for model in ("bot", "bot@prod", "bot@next", "bot@2")] == [1, 1, 2, 2]
    await lab.registry.remove_alias(lab.a, "bot", "prod")
    assert await version_of("bot") == 2
    assert await version_of("tiny") is None


async def test_a_resolved_model_knows_its_digest_and_label(lab: Lab) -> None:
    """What the engine is asked for, and what usage is written under."""
    adapter = await lab.publish()

    resolved = await lab.registry.resolve(lab.a, "bot", "tiny")
    base = await lab.registry.resolve(lab.a, "tiny", "tiny")

    assert (resolved.requested, resolved.digest, resolved.label) == ("bot", adapter.versions[0].digest, "bot@1")
    assert (base.requested, base.digest, base.label) == ("tiny", None, "tiny")


async def test_what_is_unknown_or_malformed_is_one_kind_of_not_found(lab: Lab) -> None:
    """The answers differ in nothing but the name; no text is one that the database could choke on."""
    await lab.publish()
    models = ["", "none", "bot@2", "bot@prod", "bot@0", "bot@", "@1", "bot@1@1", "../bot", "tiny@1", "\0", "\ud800"]

    for model in models:
        with pytest.raises(NotFound) as caught:
            await lab.registry.resolve(lab.a, model, "tiny")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        if "@" not in model:
            with pytest.raises(NotFound):
                await lab.registry.get(lab.a, model)
            with pytest.raises(NotFound):
                await lab.registry.list(lab.a, PageRequest(after=model))


async def test_a_canary_shares_requests_by_weight(lab: Lab) -> None:
    """Drawn by the generator that the registry was given, anew for each request."""
    for seed in (0, 1):
        await lab.publish(seed=seed)
    await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.75, "2": 0.25}}))
    expected = random.Random(3).choices([1, 2], weights=[0.75, 0.25], k=1)[0]

    versions = [(await lab.registry.resolve(lab.a, "bot", "tiny")).version for _ in range(40)]

    drawn = Counter(version.version for version in versions if version)
    assert versions[0] is not None
    assert versions[0].version == expected
    assert 20 <= drawn[1] <= 39
    assert drawn[1] + drawn[2] == 40


async def test_moving_an_alias_answers_with_where_it_led(lab: Lab) -> None:
    """So that a rollback knows where to."""
    for seed in (0, 1):
        await lab.publish(seed=seed)

    first = await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.to_version(1))
    second = await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.to_version(2))
    removed = await lab.registry.remove_alias(lab.a, "bot", "prod")

    one, two = AliasTarget.to_version(1), AliasTarget.to_version(2)
    assert [(change.target, change.previous) for change in (first, second, removed)] == [
        (one, None),
        (two, one),
        (None, two),
    ]


async def test_an_alias_leads_only_to_versions_that_exist(lab: Lab) -> None:
    """All versions of a canary are checked; a wrong one leaves the alias as it was."""
    await lab.publish()

    with pytest.raises(NotFound):
        await lab.registry.set_alias(lab.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 1, "2": 1}}))
    with pytest.raises(NotFound):
        await lab.registry.remove_alias(lab.a, "bot", "prod")
    with pytest.raises(ValidationFailed):
        await lab.registry.set_alias(lab.a, "bot", "1", AliasTarget.to_version(1))
    assert (await lab.registry.get(lab.a, "bot")).aliases == {}


def answer(error: GraftworkError) -> dict[str, Any]:
    return error.body() | {"status": error.status}


async def test_anothers_adapter_answers_like_one_that_does_not_exist(lab: Lab) -> None:
    """Every verb, byte by byte, but for the name that is echoed."""
    await lab.publish("secret")
    await lab.registry.set_alias(lab.a, "secret", "prod", AliasTarget.to_version(1))
    target = AliasTarget.to_version(1)
    verbs: list[Callable[[str], Any]] = [
        lambda name: lab.registry.get(lab.b, name),
        lambda name: lab.registry.delete(lab.b, name),
        lambda name: lab.registry.delete_version(lab.b, name, 1),
        lambda name: lab.registry.set_alias(lab.b, name, "prod", target),
        lambda name: lab.registry.remove_alias(lab.b, name, "prod"),
        lambda name: lab.registry.resolve(lab.b, name, "tiny"),
        lambda name: lab.registry.resolve(lab.b, f"{name}@1", "tiny"),
        lambda name: lab.registry.resolve(lab.b, f"{name}@prod", "tiny"),
    ]

    for verb in verbs:
        with pytest.raises(NotFound) as foreign:
            await verb("secret")
        with pytest.raises(NotFound) as unknown:
            await verb("absent")
        assert str(answer(foreign.value)).replace("secret", "absent") == str(answer(unknown.value))

    assert (await lab.registry.list(lab.b)).items == ()
    assert await lab.registry.model_names(lab.b) == ()
    assert (await lab.registry.get(lab.a, "secret")).aliases == {"prod": target}


async def test_tenants_may_use_one_name_for_different_weights(lab: Lab) -> None:
    """Each resolves to its own."""
    await lab.publish("bot", seed=0, scope=lab.a)
    await lab.publish("bot", seed=1, scope=lab.b)

    digests = [(await lab.registry.resolve(scope, "bot", "tiny")).digest for scope in (lab.a, lab.b)]

    assert len(set(digests)) == 2
    await lab.registry.delete(lab.b, "bot")
    assert (await lab.registry.resolve(lab.a, "bot", "tiny")).digest == digests[0]


async def test_a_refused_upload_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    """No row, no file, whatever was wrong with it."""
    bad = [
        ("bot", config_bytes(), FILES[0][:-1]),
        ("bot", config_bytes(r=8), FILES[0]),
        ("bot", b"{", FILES[0]),
        ("../bot", config_bytes(), FILES[0]),
        ("tiny", config_bytes(), FILES[0]),
        ("bot", config_bytes(), b"PK\x03\x04" + bytes(50)),
    ]

    for name, config, weights in bad:
        with pytest.raises(ValidationFailed):
            await lab.registry.publish(lab.a, name, config, weights, DESCRIPTION, NO_LIMITS)

    assert (await lab.registry.list(lab.a)).items == ()
    assert lab.stored == set()
    assert await lab.registry.sweep() == ()


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Quota(max_adapters=1), "max_adapters_exceeded"),
        (Quota(max_adapter_bytes=2 * BYTES - 1), "max_adapter_bytes_exceeded"),
        (Quota(max_adapters=0), "max_adapters_exceeded"),
    ],
)
async def test_a_limit_on_number_or_bytes_is_a_429_that_says_not_to_retry(lab: Lab, limits: Quota, code: str) -> None:
    """Another name above the limit is refused and leaves nothing."""
    await lab.publish("one", seed=0)

    with pytest.raises(BudgetSpent) as caught:
        await lab.publish("two", seed=1, limits=limits)

    assert (caught.value.status, caught.value.code) == (429, code)
    assert caught.value.headers() == {"x-should-retry": "false"}
    assert await lab.registry.model_names(lab.a) == ("one",)
    assert len(lab.stored) == 1


async def test_a_limit_counts_only_ones_own(lab: Lab) -> None:
    """Another tenant's adapters are none of one's business; the limit itself can be reached."""
    await lab.publish("one", seed=0, scope=lab.b)

    limits = Quota(max_adapters=1, max_adapter_bytes=2 * BYTES, max_adapter_rank=4)
    await lab.publish("one", seed=0, limits=limits)
    await lab.publish("one", seed=1, limits=limits)

    assert len((await lab.registry.get(lab.a, "one")).versions) == 2


@pytest.mark.parametrize(
    ("config", "param"), [({}, "config.r"), ({"r": 2, "rank_pattern": {".*": 4}}, "config.rank_pattern")]
)
async def test_a_rank_above_the_tenants_limit_fails_validation(lab: Lab, config: dict[str, Any], param: str) -> None:
    """422, not 429: another upload is needed, not another day."""
    with pytest.raises(ValidationFailed) as caught:
        await lab.publish(limits=Quota(max_adapter_rank=3), **config)

    assert caught.value.param == param
    assert lab.stored == set()


async def test_limits_are_exact_when_uploads_race(lab: Lab) -> None:
    """Six at once on a limit of three: three are kept, and nothing of the others."""
    uploads = [lab.publish(f"n{seed}", seed=seed, limits=Quota(max_adapters=3)) for seed in range(6)]

    results = await asyncio.gather(*uploads, return_exceptions=True)

    kept = [result for result in results if isinstance(result, Adapter)]
    assert len(kept) == 3
    assert all(isinstance(result, Adapter | BudgetSpent) for result in results)
    assert lab.stored == {adapter.versions[0].digest for adapter in kept}


async def test_racing_uploads_of_one_adapter_are_one_version(lab: Lab) -> None:
    """All get the same answer."""
    results = await asyncio.gather(*(lab.publish() for _ in range(6)))

    assert len({adapter.versions[0] for adapter in results}) == 1
    assert [len(adapter.versions) for adapter in results] == [1] * 6


async def test_racing_uploads_under_one_name_get_different_numbers(lab: Lab) -> None:
    """No version overwrites another."""
    await asyncio.gather(*(lab.publish(seed=seed) for seed in range(6)))

    adapter = await lab.registry.get(lab.a, "bot")
    assert [version.version for version in adapter.versions] == [1, 2, 3, 4, 5, 6]
    assert len(lab.stored) == 6


async def test_whoever_has_a_version_has_its_files_while_others_delete_the_same(lab: Lab) -> None:
    """Two tenants publish and delete equal bytes at once; each version that is left can be loaded."""

    async def churn(scope: TenantScope) -> None:
        for _ in range(4):
            await lab.publish(scope=scope)
            await lab.registry.delete(scope, "bot")
        await lab.publish(scope=scope)

    await asyncio.gather(churn(lab.a), churn(lab.b))

    (digest,) = lab.stored
    assert ArtifactAdapterSource(lab.root, DESCRIPTION).load(digest).max_rank == 4
    assert await lab.registry.sweep() == ()


async def test_files_that_another_freed_during_an_upload_are_written_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between writing the files and recording the version, the last other version of the digest may go."""
    put, delete = lab.store.put, lab.store.delete
    digests: list[str] = []

    def put_then_lose(digest: str, config: bytes, weights: bytes) -> None:
        put(digest, config, weights)
        if not digests:
            delete(digest)
        digests.append(digest)

    monkeypatch.setattr(lab.store, "put", put_then_lose)

    adapter = await lab.publish()

    assert digests == [adapter.versions[0].digest] * 2
    assert lab.probed == [adapter.versions[0].digest]
    assert lab.stored == {adapter.versions[0].digest}


async def test_a_store_that_fails_leaves_no_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error, not an adapter without weights."""

    def full(_digest: str, _config: bytes, _weights: bytes) -> None:
        raise Unavailable("No space left on device")

    monkeypatch.setattr(lab.store, "put", full)

    with pytest.raises(Unavailable, match="No space"):
        await lab.publish()

    assert (await lab.registry.list(lab.a)).items == ()
    assert await lab.registry.sweep() == ()


async def test_an_upload_cancelled_while_its_files_are_written_leaves_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is waited for; else its files would appear after everybody has left."""
    begun, go_on = threading.Event(), threading.Event()
    put = lab.store.put

    def slow(digest: str, config: bytes, weights: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        put(digest, config, weights)

    monkeypatch.setattr(lab.store, "put", slow)

    upload = asyncio.create_task(lab.publish())
    await asyncio.to_thread(begun.wait, 60)
    upload.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    is_over = upload.done()
    go_on.set()
    assert not is_over
    with pytest.raises(asyncio.CancelledError):
        await upload

    assert lab.stored == set()
    assert await lab.registry.sweep() == ()


async def test_sweep_removes_what_a_crash_left_behind(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose version was never written, or whose removal was never finished; nothing else."""
    kept = await lab.publish("kept", seed=0)
    lost = await lab.publish("lost", seed=1)

    def crash(_digest: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            await lab.registry.delete(lab.a, "lost")
    assert len(lab.stored) == 2

    assert await lab.registry.sweep() == (lost.versions[0].digest,)
    assert lab.stored == {kept.versions[0].digest}


async def test_an_engine_that_is_gone_does_not_keep_an_adapter_from_being_deleted(lab: Lab) -> None:
    """It holds nothing that would have to be forgotten."""

    async def gone(_digest: str) -> None:
        raise Unavailable("no engine answers")

    registry = AdapterRegistry(lab.database, lab.store, lab.inspector, before_free=gone)
    await lab.publish()

    assert len(await registry.delete(lab.a, "bot")) == 1
    assert lab.stored == set()


async def test_deleting_all_of_a_tenant_leaves_the_others(lab: Lab) -> None:
    """Adapters, aliases and files of one tenant; a shared artifact stays with whoever is left."""
    await lab.publish("one", seed=0)
    await lab.publish("two", seed=1)
    shared = await lab.publish("one", seed=0, scope=lab.b)

    freed = await lab.registry.delete_all(lab.a)

    assert len(freed) == 1
    assert await lab.registry.model_names(lab.a) == ()
    assert await lab.registry.model_names(lab.b) == ("one",)
    assert lab.stored == {shared.versions[0].digest}


async def test_model_names_list_adapters_and_their_aliases(lab: Lab) -> None:
    """By name; an adapter that has lost its versions cannot be asked for."""
    await lab.publish("b", seed=0)
    await lab.publish("a", seed=1)
    await lab.publish("empty", seed=2)
    await lab.registry.delete_version(lab.a, "empty", 1)
    for alias in ("prod", "beta"):
        await lab.registry.set_alias(lab.a, "a", alias, AliasTarget.to_version(1))

    assert await lab.registry.model_names(lab.a) == ("a", "a@beta", "a@prod", "b")
    with pytest.raises(NotFound):
        await lab.registry.resolve(lab.a, "empty", "tiny")


async def test_an_adapter_is_gone_with_its_last_version(lab: Lab) -> None:
    """It is in no list, frees its place and its files, and is unknown; its name goes on with the next number."""
    limits = Quota(max_adapters=1)
    await lab.publish("bot", seed=0)
    await lab.registry.delete_version(lab.a, "bot", 1)

    listed = await lab.registry.list(lab.a)
    for unknown in (lab.registry.get(lab.a, "bot"), lab.registry.delete(lab.a, "bot")):
        with pytest.raises(NotFound, match="does not exist"):
            await unknown
    assert (listed.items, lab.stored) == ((), set())
    other = await lab.publish("other", seed=1, limits=limits)
    await lab.registry.delete(lab.a, other.name)
    again = await lab.publish("bot", seed=2, limits=limits)
    assert [version.version for version in again.versions] == [2]


async def test_lists_go_by_age_in_pages(lab: Lab) -> None:
    """Following the last id of each page meets every adapter once, in either order; ids sort by age."""
    ids = sorted([(await lab.publish(f"n{seed}", seed=seed)).id for seed in range(5)])

    for order, expected in ((Order.DESCENDING, ids[::-1]), (Order.ASCENDING, ids)):
        seen, after, has_more = [], None, True
        while has_more:
            page = await lab.registry.list(lab.a, PageRequest(limit=2, after=after, order=order))
            seen += [adapter.id for adapter in page.items]
            after, has_more = seen[-1], page.has_more
        assert seen == expected


async def test_anothers_cursor_is_an_unknown_one(lab: Lab) -> None:
    """A cursor of tenant a says nothing to tenant b."""
    adapter = await lab.publish()

    for cursor in (adapter.id, "adp_unknown"):
        with pytest.raises(NotFound):
            await lab.registry.list(lab.b, PageRequest(after=cursor))


async def test_a_version_is_there_only_once_the_engine_has_tried_it(lab: Lab) -> None:
    """New weights are tried once; the same bytes for another name or tenant are known to work."""
    (version,) = (await lab.publish("one")).versions
    await lab.publish("two")
    await lab.publish("three", scope=lab.b)
    await lab.publish("one", seed=1)

    assert lab.probed[0] == version.digest
    assert len(lab.probed) == len(set(lab.probed)) == 2


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (ValidationFailed("the probe differs"), ValidationFailed),
        (Unavailable("no engine"), Unavailable),
        (NotFound("no such artifact"), Unavailable),
    ],
)
async def test_what_the_engine_cannot_serve_is_not_stored(
    lab: Lab, refusal: GraftworkError, expected: type[GraftworkError]
) -> None:
    """The client is told why; neither a name nor a file is left, and a later try is tried again."""
    lab.probe_refusal = refusal
    with pytest.raises(expected):
        await lab.publish()

    assert lab.stored == set()
    assert await lab.registry.model_names(lab.a) == ()
    assert await lab.registry.sweep() == ()
    lab.probe_refusal = None
    tries = len(lab.probed)
    assert (await lab.publish()).versions[0].version == 1
    assert len(lab.probed) == tries + 1


async def test_a_failed_try_leaves_what_others_have(lab: Lab) -> None:
    """Files that a version of another tenant needs stay, and are not tried again."""
    made = await lab.publish(scope=lab.b)
    lab.probe_refusal = ValidationFailed("the probe differs")

    again = await lab.publish()

    assert again.versions[0].digest == made.versions[0].digest
    assert len(lab.probed) == 1
