"""Tests of rotation with overlap, and of the times at which keys were last used, on both databases."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotAuthenticated, NotPermitted, ValidationFailed
from graftwork.platform.ids import KeyId
from graftwork.platform.tenancy.principals import RunningWork
from graftwork.platform.tenancy.tenancy import Tenancy

PEPPER = b"a pepper for tests"
DAY_S = 86_400.0


@pytest.fixture
def work() -> RunningWork:
    return RunningWork()


@pytest.fixture
def tenancy(database: Database, manual_clock: ManualClock, work: RunningWork) -> Tenancy:
    return Tenancy(database, PEPPER, manual_clock, work)


async def test_both_keys_work_until_the_overlap_ends(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """A rotation makes a key that allows the same; the old key works until the overlap is over, and no longer."""
    tenant = await tenancy.create_tenant("acme")
    old, first = await tenancy.create_key(
        tenant.id, "ci", scopes=["usage"], adapters=["pirate"], allowed_ips=["192.0.2.0/24", "2001:db8::1"]
    )

    new, second = await tenancy.rotate_key(tenant.id, old.id, overlap_s=3600)

    assert (new.name, new.scopes, new.adapters, new.allowed_ips) == (
        old.name,
        old.scopes,
        old.adapters,
        old.allowed_ips,
    )
    assert new.public_id != old.public_id
    manual_clock.advance(3599.9)
    for plaintext, key_id in ((first, old.id), (second, new.id)):
        principal = await tenancy.authenticate(plaintext, "192.0.2.9")
        assert (principal.key_id, principal.scopes, principal.adapters) == (key_id, old.scopes, old.adapters)
    manual_clock.advance(0.1)
    with pytest.raises(NotAuthenticated):
        await tenancy.authenticate(first, "192.0.2.9")
    assert (await tenancy.authenticate(second, "192.0.2.9")).key_id == new.id
    listed = {key.id: key for key in (await tenancy.list_keys(tenant.id)).items}
    assert (listed[old.id].replaced_by, listed[new.id].replaced_by) == (new.id, None)


@pytest.mark.parametrize(
    ("old_end", "overlap_s", "asked", "old_ends", "new_ends"),
    [
        (None, 0, None, 0, None),
        (None, 60, None, 60, None),
        (30, 60, None, 30, 30),
        (90, 60, None, 60, 90),
        (90, 60, 500, 60, 500),
    ],
)
async def test_the_end_of_both_keys(
    tenancy: Tenancy,
    manual_clock: ManualClock,
    old_end: float | None,
    overlap_s: float,
    asked: float | None,
    old_ends: float,
    new_ends: float | None,
) -> None:
    """An overlap never makes a key live longer, and the new key ends with the old one's end unless another is asked."""
    tenant, now = await tenancy.create_tenant("acme"), manual_clock.now()

    def moment(after: float | None) -> float | None:
        return None if after is None else now + after

    old, _ = await tenancy.create_key(tenant.id, "ci", expires_at=moment(old_end))
    new, _ = await tenancy.rotate_key(tenant.id, old.id, overlap_s=overlap_s, expires_at=moment(asked))

    listed = {key.id: key.expires_at for key in (await tenancy.list_keys(tenant.id)).items}
    assert listed == {old.id: moment(old_ends), new.id: moment(new_ends)}


async def test_a_key_is_rotated_once(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """A replaced, revoked or expired key cannot be rotated, and the refusal names the key that can."""
    tenant = await tenancy.create_tenant("acme")
    replaced, _ = await tenancy.create_key(tenant.id, "a")
    revoked, _ = await tenancy.create_key(tenant.id, "b")
    expired, _ = await tenancy.create_key(tenant.id, "c", expires_at=manual_clock.now())
    new, _ = await tenancy.rotate_key(tenant.id, replaced.id, overlap_s=60)
    await tenancy.revoke_key(tenant.id, revoked.id)

    for key, code in ((replaced, "key_replaced"), (revoked, "key_revoked"), (expired, "key_expired")):
        with pytest.raises(Conflict) as refusal:
            await tenancy.rotate_key(tenant.id, key.id)
        assert refusal.value.code == code
        assert key is not replaced or new.id in refusal.value.message
    for overlap_s in (-1.0, 31 * DAY_S, float("nan")):
        with pytest.raises(ValidationFailed):
            await tenancy.rotate_key(tenant.id, new.id, overlap_s=overlap_s)
    assert len((await tenancy.list_keys(tenant.id)).items) == 4


async def test_work_ends_with_its_key(tenancy: Tenancy, work: RunningWork) -> None:
    """A rotation without overlap cancels what the old key runs; one with overlap lets it run."""
    tenant = await tenancy.create_tenant("acme")
    ended: list[KeyId] = []
    for overlap_s in (60.0, 0.0):
        key, plaintext = await tenancy.create_key(tenant.id, "ci")
        principal = await tenancy.authenticate(plaintext)
        work.add(principal, lambda _, key_id=key.id: ended.append(key_id))  # type: ignore[misc]
        await tenancy.rotate_key(tenant.id, key.id, overlap_s=overlap_s)

    assert ended == [key.id]


async def test_a_key_is_used_from_its_networks_only(tenancy: Tenancy) -> None:
    """A key with networks is a 403 from elsewhere, which does not tell the networks; other keys work from anywhere."""
    tenant = await tenancy.create_tenant("acme")
    _, bound = await tenancy.create_key(tenant.id, "a", allowed_ips=["192.0.2.0/24"])
    _, free = await tenancy.create_key(tenant.id, "b")

    assert (await tenancy.authenticate(bound, "192.0.2.200")).tenant_id == tenant.id
    for address in ("192.0.3.1", "2001:db8::1", ""):
        with pytest.raises(NotPermitted) as refusal:
            await tenancy.authenticate(bound, address)
        assert refusal.value.code == "address_not_allowed"
        assert "192.0.2" not in refusal.value.message
        assert (await tenancy.authenticate(free, address)).tenant_id == tenant.id


async def test_last_use_is_stored_after_the_request(tenancy: Tenancy, manual_clock: ManualClock) -> None:
    """A request stores nothing. `flush` stores the time of a key's use at most once a minute, and never goes back."""
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")
    first_use = manual_clock.now()

    async def stored() -> float | None:
        return (await tenancy.list_keys(tenant.id)).items[0].last_used_at

    await tenancy.authenticate(plaintext)
    assert await stored() is None
    manual_clock.advance(3)
    await tenancy.uses.flush()
    assert await stored() == first_use
    for seconds, expected in ((50, 0), (6.9, 0), (0.1, 60)):
        manual_clock.advance(seconds)
        await tenancy.authenticate(plaintext)
        await tenancy.uses.flush()
        assert await stored() == first_use + expected


async def test_a_failed_store_is_made_up_for(
    tenancy: Tenancy, database: Database, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use that could not be stored is stored by the next flush, and another gateway's later time stays."""
    tenant = await tenancy.create_tenant("acme")
    _, plaintext = await tenancy.create_key(tenant.id, "ci")
    used_at = manual_clock.now()
    await tenancy.authenticate(plaintext)
    with monkeypatch.context() as broken:
        broken.setattr("graftwork.platform.tenancy.key_rows._NOTE_USED", None)
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the database driver says
            await tenancy.uses.flush()
    await tenancy.uses.flush()
    assert (await tenancy.list_keys(tenant.id)).items[0].last_used_at == used_at

    manual_clock.advance(100)
    other = Tenancy(database, PEPPER, manual_clock)
    await tenancy.authenticate(plaintext)
    manual_clock.advance(1)
    await other.authenticate(plaintext)
    await other.uses.flush()
    await tenancy.uses.flush()
    assert (await tenancy.list_keys(tenant.id)).items[0].last_used_at == used_at + 101
