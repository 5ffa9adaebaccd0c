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


class TwoTenants:
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
async def two_tenants(
    database: Database, tmp_path: Path, manual_clock: ManualClock, inspector: AdapterInspector
) -> TwoTenants:
    async with database.write() as session:
        for name in ("ten_a", "ten_b"):
            await add_tenant(session, Tenant(TenantId(name), name, TenantStatus.ACTIVE, 1.0, "default", 0.0))
    return TwoTenants(database, tmp_path / "artifacts", manual_clock, inspector)


async def test_a_published_adapter_is_described_stored_and_loadable(two_tenants: TwoTenants) -> None:
    """The answer of the upload, the answer of a later look and the engine's view agree."""
    made = await two_tenants.publish()

    (version,) = made.versions
    assert (made.name, version.version, version.rank, version.size_bytes) == ("bot", 1, 4, BYTES)
    assert (version.target_modules, version.status) == (("q_proj", "v_proj", "down_proj"), "ready")
    assert (made.created_at, version.created_at) == (two_tenants.clock.now(), two_tenants.clock.now())
    assert await two_tenants.registry.get(two_tenants.a, "bot") == made
    assert two_tenants.stored == {version.digest}
    assert len(ArtifactAdapterSource(two_tenants.root, DESCRIPTION).load(version.digest).pairs) == 6


async def test_other_weights_under_a_name_make_the_next_version(two_tenants: TwoTenants) -> None:
    """Versions count up; each keeps its digest."""
    first = await two_tenants.publish(seed=0)
    two_tenants.clock.advance(60)
    second = await two_tenants.publish(seed=1)

    assert [version.version for version in second.versions] == [1, 2]
    assert second.versions[0] == first.versions[0]
    assert second.id == first.id
    assert second.versions[1].created_at == second.created_at + 60
    assert await two_tenants.registry.get(two_tenants.a, "bot") == second


async def test_the_same_bytes_again_are_the_same_version(two_tenants: TwoTenants) -> None:
    """Also when newer versions have come, and when the limits are spent."""
    first = await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)

    again = await two_tenants.publish(seed=0, limits=Quota(max_adapters=1, max_adapter_bytes=1))

    assert [version.version for version in again.versions] == [1, 2]
    assert again.versions[0] == first.versions[0]


async def test_the_same_weights_at_another_scale_are_another_version(two_tenants: TwoTenants) -> None:
    """Identity is what is computed, not the weights file."""
    await two_tenants.publish()
    adapter = await two_tenants.publish(lora_alpha=9)

    assert len({version.digest for version in adapter.versions}) == 2


async def test_two_names_and_two_tenants_share_one_artifact(two_tenants: TwoTenants) -> None:
    """One digest, one pair of files, whoever uploads it."""
    one = await two_tenants.publish("one")
    two = await two_tenants.publish("two")
    three = await two_tenants.publish("three", scope=two_tenants.b)

    digests = {adapter.versions[0].digest for adapter in (one, two, three)}
    assert two_tenants.stored == digests
    assert len(digests) == 1


async def test_files_go_with_the_last_version_of_any_tenant(two_tenants: TwoTenants) -> None:
    """And the engine is told just before, once."""
    for name, scope in (("one", two_tenants.a), ("two", two_tenants.a), ("one", two_tenants.b)):
        adapter = await two_tenants.publish(name, scope=scope)
    digest = adapter.versions[0].digest

    freed = [
        await two_tenants.registry.delete(two_tenants.a, "one"),
        await two_tenants.registry.delete_version(two_tenants.a, "two", 1),
        await two_tenants.registry.delete(two_tenants.b, "one"),
    ]

    assert freed == [(), (), (digest,)]
    assert two_tenants.stored == set()
    assert two_tenants.forgotten == [digest]


async def test_a_deleted_adapter_is_gone_and_its_name_is_free(two_tenants: TwoTenants) -> None:
    """What comes after under its name begins anew."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)
    await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))

    freed = await two_tenants.registry.delete(two_tenants.a, "bot")

    assert len(freed) == 2
    for model in ("bot", "bot@1", "bot@prod"):
        with pytest.raises(NotFound):
            await two_tenants.registry.resolve(two_tenants.a, model, "tiny")
    again = await two_tenants.publish(seed=2)
    assert [version.version for version in again.versions] == [1]
    assert again.aliases == {}


async def test_a_version_number_is_never_used_again(two_tenants: TwoTenants) -> None:
    """Who pinned name@2 must not meet other weights under it."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)
    await two_tenants.registry.delete_version(two_tenants.a, "bot", 2)

    adapter = await two_tenants.publish(seed=2)
    back = await two_tenants.publish(seed=1)

    assert [version.version for version in adapter.versions] == [1, 3]
    assert [version.version for version in back.versions] == [1, 3, 4]


async def test_a_version_that_an_alias_leads_to_cannot_be_deleted(two_tenants: TwoTenants) -> None:
    """Not even one that a canary leads to; the error names the alias."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.set_alias(
        two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.9, "2": 0.1}})
    )

    with pytest.raises(Conflict) as caught:
        await two_tenants.registry.delete_version(two_tenants.a, "bot", 2)

    assert caught.value.details == {"aliases": ["prod"]}
    assert len(two_tenants.stored) == 2


async def test_resolving_a_name_prefers_prod_and_then_the_newest(two_tenants: TwoTenants) -> None:
    """A bare name follows the alias `prod` once there is one."""
    await two_tenants.publish(seed=0)
    await two_tenants.publish(seed=1)

    async def version_of(model: str) -> int | None:
        version = (await two_tenants.registry.resolve(two_tenants.a, model, "tiny")).version
        return version.version if version else None

    assert await version_of("bot") == 2
    await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    await two_tenants.registry.set_alias(two_tenants.a, "bot", "next", AliasTarget.to_version(2))
    assert [await version_of(model) for model in ("bot", "bot@prod", "bot@next", "bot@2")] == [1, 1, 2, 2]
    await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")
    assert await version_of("bot") == 2
    assert await version_of("tiny") is None


async def test_a_resolved_model_knows_its_digest_and_label(two_tenants: TwoTenants) -> None:
    """What the engine is asked for, and what usage is written under."""
    adapter = await two_tenants.publish()

    resolved = await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny")
    base = await two_tenants.registry.resolve(two_tenants.a, "tiny", "tiny")

    assert (resolved.requested, resolved.digest, resolved.label) == ("bot", adapter.versions[0].digest, "bot@1")
    assert (base.requested, base.digest, base.label) == ("tiny", None, "tiny")


async def test_what_is_unknown_or_malformed_is_one_kind_of_not_found(two_tenants: TwoTenants) -> None:
    """The answers differ in nothing but the name; no text is one that the database could choke on."""
    await two_tenants.publish()
    models = ["", "none", "bot@2", "bot@prod", "bot@0", "bot@", "@1", "bot@1@1", "../bot", "tiny@1", "\0", "\ud800"]

    for model in models:
        with pytest.raises(NotFound) as caught:
            await two_tenants.registry.resolve(two_tenants.a, model, "tiny")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        if "@" not in model:
            with pytest.raises(NotFound):
                await two_tenants.registry.get(two_tenants.a, model)
            with pytest.raises(NotFound):
                await two_tenants.registry.list(two_tenants.a, PageRequest(after=model))


async def test_a_canary_shares_requests_by_weight(two_tenants: TwoTenants) -> None:
    """Drawn by the generator that the registry was given, anew for each request."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.set_alias(
        two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 0.75, "2": 0.25}})
    )
    expected = random.Random(3).choices([1, 2], weights=[0.75, 0.25], k=1)[0]

    versions = [(await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny")).version for _ in range(40)]

    drawn = Counter(version.version for version in versions if version)
    assert versions[0] is not None
    assert versions[0].version == expected
    assert 20 <= drawn[1] <= 39
    assert drawn[1] + drawn[2] == 40


async def test_moving_an_alias_answers_with_where_it_led(two_tenants: TwoTenants) -> None:
    """So that a rollback knows where to."""
    for seed in (0, 1):
        await two_tenants.publish(seed=seed)

    first = await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    second = await two_tenants.registry.set_alias(two_tenants.a, "bot", "prod", AliasTarget.to_version(2))
    removed = await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")

    one, two = AliasTarget.to_version(1), AliasTarget.to_version(2)
    assert [(change.target, change.previous) for change in (first, second, removed)] == [
        (one, None),
        (two, one),
        (None, two),
    ]


async def test_an_alias_leads_only_to_versions_that_exist(two_tenants: TwoTenants) -> None:
    """All versions of a canary are checked; a wrong one leaves the alias as it was."""
    await two_tenants.publish()

    with pytest.raises(NotFound):
        await two_tenants.registry.set_alias(
            two_tenants.a, "bot", "prod", AliasTarget.from_json({"weights": {"1": 1, "2": 1}})
        )
    with pytest.raises(NotFound):
        await two_tenants.registry.remove_alias(two_tenants.a, "bot", "prod")
    with pytest.raises(ValidationFailed):
        await two_tenants.registry.set_alias(two_tenants.a, "bot", "1", AliasTarget.to_version(1))
    assert (await two_tenants.registry.get(two_tenants.a, "bot")).aliases == {}


def answer(error: GraftworkError) -> dict[str, Any]:
    return error.body() | {"status": error.status}


async def test_anothers_adapter_answers_like_one_that_does_not_exist(two_tenants: TwoTenants) -> None:
    """Every verb, byte by byte, but for the name that is echoed."""
    await two_tenants.publish("secret")
    await two_tenants.registry.set_alias(two_tenants.a, "secret", "prod", AliasTarget.to_version(1))
    target = AliasTarget.to_version(1)
    verbs: list[Callable[[str], Any]] = [
        lambda name: two_tenants.registry.get(two_tenants.b, name),
        lambda name: two_tenants.registry.delete(two_tenants.b, name),
        lambda name: two_tenants.registry.delete_version(two_tenants.b, name, 1),
        lambda name: two_tenants.registry.set_alias(two_tenants.b, name, "prod", target),
        lambda name: two_tenants.registry.remove_alias(two_tenants.b, name, "prod"),
        lambda name: two_tenants.registry.resolve(two_tenants.b, name, "tiny"),
        lambda name: two_tenants.registry.resolve(two_tenants.b, f"{name}@1", "tiny"),
        lambda name: two_tenants.registry.resolve(two_tenants.b, f"{name}@prod", "tiny"),
    ]

    for verb in verbs:
        with pytest.raises(NotFound) as foreign:
            await verb("secret")
        with pytest.raises(NotFound) as unknown:
            await verb("absent")
        assert str(answer(foreign.value)).replace("secret", "absent") == str(answer(unknown.value))

    assert (await two_tenants.registry.list(two_tenants.b)).items == ()
    assert await two_tenants.registry.model_names(two_tenants.b) == ()
    assert (await two_tenants.registry.get(two_tenants.a, "secret")).aliases == {"prod": target}


async def test_tenants_may_use_one_name_for_different_weights(two_tenants: TwoTenants) -> None:
    """Each resolves to its own."""
    await two_tenants.publish("bot", seed=0, scope=two_tenants.a)
    await two_tenants.publish("bot", seed=1, scope=two_tenants.b)

    digests = [
        (await two_tenants.registry.resolve(scope, "bot", "tiny")).digest for scope in (two_tenants.a, two_tenants.b)
    ]

    assert len(set(digests)) == 2
    await two_tenants.registry.delete(two_tenants.b, "bot")
    assert (await two_tenants.registry.resolve(two_tenants.a, "bot", "tiny")).digest == digests[0]


async def test_a_refused_upload_leaves_nothing(two_tenants: TwoTenants, tmp_path: Path) -> None:
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
            await two_tenants.registry.publish(two_tenants.a, name, config, weights, DESCRIPTION, NO_LIMITS)

    assert (await two_tenants.registry.list(two_tenants.a)).items == ()
    assert two_tenants.stored == set()
    assert await two_tenants.registry.sweep() == ()


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Quota(max_adapters=1), "max_adapters_exceeded"),
        (Quota(max_adapter_bytes=2 * BYTES - 1), "max_adapter_bytes_exceeded"),
        (Quota(max_adapters=0), "max_adapters_exceeded"),
    ],
)
async def test_a_limit_on_number_or_bytes_is_a_429_that_says_not_to_retry(
    two_tenants: TwoTenants, limits: Quota, code: str
) -> None:
    """Another name above the limit is refused and leaves nothing."""
    await two_tenants.publish("one", seed=0)

    with pytest.raises(BudgetSpent) as caught:
        await two_tenants.publish("two", seed=1, limits=limits)

    assert (caught.value.status, caught.value.code) == (429, code)
    assert caught.value.headers() == {"x-should-retry": "false"}
    assert await two_tenants.registry.model_names(two_tenants.a) == ("one",)
    assert len(two_tenants.stored) == 1


async def test_a_limit_counts_only_ones_own(two_tenants: TwoTenants) -> None:
    """Another tenant's adapters are none of one's business; the limit itself can be reached."""
    await two_tenants.publish("one", seed=0, scope=two_tenants.b)

    limits = Quota(max_adapters=1, max_adapter_bytes=2 * BYTES, max_adapter_rank=4)
    await two_tenants.publish("one", seed=0, limits=limits)
    await two_tenants.publish("one", seed=1, limits=limits)

    assert len((await two_tenants.registry.get(two_tenants.a, "one")).versions) == 2


@pytest.mark.parametrize(
    ("config", "param"), [({}, "config.r"), ({"r": 2, "rank_pattern": {".*": 4}}, "config.rank_pattern")]
)
async def test_a_rank_above_the_tenants_limit_fails_validation(
    two_tenants: TwoTenants, config: dict[str, Any], param: str
) -> None:
    """422, not 429: another upload is needed, not another day."""
    with pytest.raises(ValidationFailed) as caught:
        await two_tenants.publish(limits=Quota(max_adapter_rank=3), **config)

    assert caught.value.param == param
    assert two_tenants.stored == set()


async def test_limits_are_exact_when_uploads_race(two_tenants: TwoTenants) -> None:
    """Six at once on a limit of three: three are kept, and nothing of the others."""
    uploads = [two_tenants.publish(f"n{seed}", seed=seed, limits=Quota(max_adapters=3)) for seed in range(6)]

    results = await asyncio.gather(*uploads, return_exceptions=True)

    kept = [result for result in results if isinstance(result, Adapter)]
    assert len(kept) == 3
    assert all(isinstance(result, Adapter | BudgetSpent) for result in results)
    assert two_tenants.stored == {adapter.versions[0].digest for adapter in kept}


async def test_racing_uploads_of_one_adapter_are_one_version(two_tenants: TwoTenants) -> None:
    """All get the same answer."""
    results = await asyncio.gather(*(two_tenants.publish() for _ in range(6)))

    assert len({adapter.versions[0] for adapter in results}) == 1
    assert [len(adapter.versions) for adapter in results] == [1] * 6


async def test_racing_uploads_under_one_name_get_different_numbers(two_tenants: TwoTenants) -> None:
    """No version overwrites another."""
    await asyncio.gather(*(two_tenants.publish(seed=seed) for seed in range(6)))

    adapter = await two_tenants.registry.get(two_tenants.a, "bot")
    assert [version.version for version in adapter.versions] == [1, 2, 3, 4, 5, 6]
    assert len(two_tenants.stored) == 6


async def test_whoever_has_a_version_has_its_files_while_others_delete_the_same(two_tenants: TwoTenants) -> None:
    """Two tenants publish and delete equal bytes at once; each version that is left can be loaded."""

    async def churn(scope: TenantScope) -> None:
        for _ in range(4):
            await two_tenants.publish(scope=scope)
            await two_tenants.registry.delete(scope, "bot")
        await two_tenants.publish(scope=scope)

    await asyncio.gather(churn(two_tenants.a), churn(two_tenants.b))

    (digest,) = two_tenants.stored
    assert ArtifactAdapterSource(two_tenants.root, DESCRIPTION).load(digest).max_rank == 4
    assert await two_tenants.registry.sweep() == ()


async def test_files_that_another_freed_during_an_upload_are_written_again(
    two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between writing the files and recording the version, the last other version of the digest may go."""
    put, delete = two_tenants.store.put, two_tenants.store.delete
    digests: list[str] = []

    def put_then_lose(digest: str, config: bytes, weights: bytes) -> None:
        put(digest, config, weights)
        if not digests:
            delete(digest)
        digests.append(digest)

    monkeypatch.setattr(two_tenants.store, "put", put_then_lose)

    adapter = await two_tenants.publish()

    assert digests == [adapter.versions[0].digest] * 2
    assert two_tenants.probed == [adapter.versions[0].digest]
    assert two_tenants.stored == {adapter.versions[0].digest}


async def test_a_store_that_fails_leaves_no_rows(two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error, not an adapter without weights."""

    def full(_digest: str, _config: bytes, _weights: bytes) -> None:
        raise Unavailable("No space left on device")

    monkeypatch.setattr(two_tenants.store, "put", full)

    with pytest.raises(Unavailable, match="No space"):
        await two_tenants.publish()

    assert (await two_tenants.registry.list(two_tenants.a)).items == ()
    assert await two_tenants.registry.sweep() == ()


async def test_an_upload_cancelled_while_its_files_are_written_leaves_nothing(
    two_tenants: TwoTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is waited for; else its files would appear after everybody has left."""
    begun, go_on = threading.Event(), threading.Event()
    put = two_tenants.store.put

    def slow(digest: str, config: bytes, weights: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        put(digest, config, weights)

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
    """Files whose version was never written, or whose removal was never finished; nothing else."""
    kept = await two_tenants.publish("kept", seed=0)
    lost = await two_tenants.publish("lost", seed=1)

    def crash(_digest: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(two_tenants.store, "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            await two_tenants.registry.delete(two_tenants.a, "lost")
    assert len(two_tenants.stored) == 2

    assert await two_tenants.registry.sweep() == (lost.versions[0].digest,)
    assert two_tenants.stored == {kept.versions[0].digest}


async def test_an_engine_that_is_gone_does_not_keep_an_adapter_from_being_deleted(two_tenants: TwoTenants) -> None:
    """It holds nothing that would have to be forgotten."""

    async def gone(_digest: str) -> None:
        raise Unavailable("no engine answers")

    registry = AdapterRegistry(two_tenants.database, two_tenants.store, two_tenants.inspector, before_free=gone)
    await two_tenants.publish()

    assert len(await registry.delete(two_tenants.a, "bot")) == 1
    assert two_tenants.stored == set()


async def test_deleting_all_of_a_tenant_leaves_the_others(two_tenants: TwoTenants) -> None:
    """Adapters, aliases and files of one tenant; a shared artifact stays with whoever is left."""
    await two_tenants.publish("one", seed=0)
    await two_tenants.publish("two", seed=1)
    shared = await two_tenants.publish("one", seed=0, scope=two_tenants.b)

    freed = await two_tenants.registry.delete_all(two_tenants.a)

    assert len(freed) == 1
    assert await two_tenants.registry.model_names(two_tenants.a) == ()
    assert await two_tenants.registry.model_names(two_tenants.b) == ("one",)
    assert two_tenants.stored == {shared.versions[0].digest}


async def test_model_names_list_adapters_and_their_aliases(two_tenants: TwoTenants) -> None:
    """By name; an adapter that has lost its versions cannot be asked for."""
    await two_tenants.publish("b", seed=0)
    await two_tenants.publish("a", seed=1)
    await two_tenants.publish("empty", seed=2)
    await two_tenants.registry.delete_version(two_tenants.a, "empty", 1)
    for alias in ("prod", "beta"):
        await two_tenants.registry.set_alias(two_tenants.a, "a", alias, AliasTarget.to_version(1))

    assert await two_tenants.registry.model_names(two_tenants.a) == ("a", "a@beta", "a@prod", "b")
    with pytest.raises(NotFound):
        await two_tenants.registry.resolve(two_tenants.a, "empty", "tiny")


async def test_lists_go_by_age_in_pages(two_tenants: TwoTenants) -> None:
    """Following the last id of each page meets every adapter once, in either order; ids sort by age."""
    ids = sorted([(await two_tenants.publish(f"n{seed}", seed=seed)).id for seed in range(5)])

    for order, expected in ((Order.DESCENDING, ids[::-1]), (Order.ASCENDING, ids)):
        seen, after, has_more = [], None, True
        while has_more:
            page = await two_tenants.registry.list(two_tenants.a, PageRequest(limit=2, after=after, order=order))
            seen += [adapter.id for adapter in page.items]
            after, has_more = seen[-1], page.has_more
        assert seen == expected


async def test_anothers_cursor_is_an_unknown_one(two_tenants: TwoTenants) -> None:
    """A cursor of tenant a says nothing to tenant b."""
    adapter = await two_tenants.publish()

    for cursor in (adapter.id, "adp_unknown"):
        with pytest.raises(NotFound):
            await two_tenants.registry.list(two_tenants.b, PageRequest(after=cursor))


async def test_a_version_is_there_only_once_the_engine_has_tried_it(two_tenants: TwoTenants) -> None:
    """New weights are tried once; the same bytes for another name or tenant are known to work."""
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
    """The client is told why; neither a name nor a file is left, and a later try is tried again."""
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
    """Files that a version of another tenant needs stay, and are not tried again."""
    made = await two_tenants.publish(scope=two_tenants.b)
    two_tenants.probe_refusal = ValidationFailed("the probe differs")

    again = await two_tenants.publish()

    assert again.versions[0].digest == made.versions[0].digest
    assert len(two_tenants.probed) == 1
