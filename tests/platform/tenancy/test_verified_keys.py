"""Tests of the memory of verified keys: what is read, and that no change stays unseen, on both databases."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database, ReadSession
from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.ids import KeyId, OrganisationId, TenantId
from graftwork.platform.keys.console_tickets import TICKET_FOR_S
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.tenants import ApiKey, Tenant, TenantStatus
from graftwork.platform.tenancy.verified_keys import MOST_KEYS, AccessChanges, VerifiedKey, VerifiedKeys

PEPPER = b"a pepper for tests"


class CountedDatabase:
    """Passes on everything to a database, and counts the reads of single rows. Can be cut off."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.num_reads = 0
        self.is_down = False

    async def read_few(self, read: Callable[[ReadSession], Awaitable[object]]) -> object:
        if self.is_down:
            raise ConnectionError("cut off")
        self.num_reads += 1
        return await self._database.read_few(read)

    def __getattr__(self, name: str) -> object:
        return getattr(self._database, name)


@pytest.fixture
def counted(database: Database) -> CountedDatabase:
    return CountedDatabase(database)


@pytest.fixture
def here(counted: CountedDatabase, manual_clock: ManualClock) -> Tenancy:
    """The tenancy of one gateway."""
    return Tenancy(counted, PEPPER, manual_clock)  # type: ignore[arg-type]


@pytest.fixture
def elsewhere(database: Database, manual_clock: ManualClock) -> Tenancy:
    """The tenancy of another gateway on the same database."""
    return Tenancy(database, PEPPER, manual_clock)


async def test_a_verified_key_reads_nothing(here: Tenancy, counted: CountedDatabase, manual_clock: ManualClock) -> None:
    """After its first use a key and its console ticket cost no read, until they were not confirmed for 0.9 seconds."""
    tenant = await here.create_tenant("acme")
    _, key = await here.create_key(tenant.id, "ci")
    ticket = (await here.ticket_for(key)).text
    await here.changes.poll()
    for token in (key, ticket):
        assert (await here.authenticate(token)).tenant_id == tenant.id
    counted.num_reads = 0

    for _ in range(10):
        assert (await here.authenticate(key)) == (await here.authenticate(ticket))
    assert counted.num_reads == 0
    manual_clock.advance(0.89)
    await here.authenticate(key)
    assert counted.num_reads == 0
    manual_clock.advance(0.02)
    await here.authenticate(key)
    assert counted.num_reads == 1


async def test_without_polls_every_key_is_read(here: Tenancy, counted: CountedDatabase) -> None:
    """A process that does not poll trusts no memory."""
    tenant = await here.create_tenant("acme")
    _, key = await here.create_key(tenant.id, "ci")
    counted.num_reads = 0

    for _ in range(3):
        await here.authenticate(key)

    assert counted.num_reads == 3


CHANGES: dict[str, tuple[Callable[[Tenancy, TenantId, KeyId], Awaitable[object]], type[Exception] | None]] = {
    "revoked": (lambda tenancy, tenant, key: tenancy.revoke_key(tenant, key), NotAuthenticated),
    "rotated": (lambda tenancy, tenant, key: tenancy.rotate_key(tenant, key), NotAuthenticated),
    "suspended": (lambda tenancy, tenant, _: tenancy.suspend_tenant(tenant), NotPermitted),
    "deleted": (lambda tenancy, tenant, _: tenancy.delete_tenant(tenant), NotAuthenticated),
    "weighed": (lambda tenancy, tenant, _: tenancy.update_tenant(tenant, weight=7.0), None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "another gateway's"])
async def test_a_change_is_followed(here: Tenancy, elsewhere: Tenancy, change: str, is_own: bool) -> None:
    """A change of this gateway takes effect at once, and one of another with the next poll, for keys and tickets."""
    act, error = CHANGES[change]
    tenant = await here.create_tenant("acme")
    stored, key = await here.create_key(tenant.id, "ci")
    ticket = (await here.ticket_for(key)).text
    await here.changes.poll()
    for token in (key, ticket):
        await here.authenticate(token)

    await act(here if is_own else elsewhere, tenant.id, stored.id)
    if not is_own:
        assert (await here.authenticate(key)).weight == 1.0  # not yet
        await here.changes.poll()

    for token in (key, ticket):
        if error is None:
            assert (await here.authenticate(token)).weight == 7.0
        else:
            with pytest.raises(error):
                await here.authenticate(token)


async def test_a_resumed_tenant_is_let_in(here: Tenancy, elsewhere: Tenancy) -> None:
    """A suspension is not remembered for longer than it lasts."""
    tenant = await here.create_tenant("acme")
    _, key = await here.create_key(tenant.id, "ci")
    await elsewhere.suspend_tenant(tenant.id)
    await here.changes.poll()
    with pytest.raises(NotPermitted):
        await here.authenticate(key)

    await elsewhere.resume_tenant(tenant.id)
    await here.changes.poll()

    assert (await here.authenticate(key)).tenant_id == tenant.id


async def test_a_revoked_key_outlives_no_failing_database(
    here: Tenancy, elsewhere: Tenancy, counted: CountedDatabase, manual_clock: ManualClock
) -> None:
    """If the database stops answering, a remembered key is trusted for the rest of the second and then not at all."""
    tenant = await here.create_tenant("acme")
    stored, key = await here.create_key(tenant.id, "ci")
    await here.changes.poll()
    await here.authenticate(key)
    counted.is_down = True
    await elsewhere.revoke_key(tenant.id, stored.id)
    for _ in range(8):
        manual_clock.advance(0.1)
        with pytest.raises(ConnectionError):
            await here.changes.poll()
        await here.authenticate(key)

    manual_clock.advance(0.11)

    with pytest.raises(ConnectionError):
        await here.authenticate(key)


async def test_times_end_in_memory_too(here: Tenancy, manual_clock: ManualClock) -> None:
    """A remembered key that expires, and a remembered ticket whose time is over, are refused to the second."""
    tenant = await here.create_tenant("acme")
    _, brief = await here.create_key(tenant.id, "a", expires_at=manual_clock.now() + 5)
    _, key = await here.create_key(tenant.id, "b")
    ticket = (await here.ticket_for(key)).text
    for token, seconds, code in ((brief, 5, "expired_api_key"), (ticket, TICKET_FOR_S - 5, "console_session_expired")):
        await here.changes.poll()
        await here.authenticate(token)
        manual_clock.advance(seconds - 0.5)
        await here.changes.poll()
        await here.authenticate(token)
        manual_clock.advance(0.5)
        with pytest.raises(NotAuthenticated) as refusal:
            await here.authenticate(token)
        assert refusal.value.code == code


async def test_a_read_from_before_a_change_is_not_remembered(database: Database, manual_clock: ManualClock) -> None:
    """A key whose row was read before a change, but arrives after it, is used for its own request alone."""
    held, go_on, has_read = False, asyncio.Event(), asyncio.Event()

    class HoldingDatabase(CountedDatabase):
        async def read_few(self, read: Callable[[ReadSession], Awaitable[object]]) -> object:
            found = await super().read_few(read)
            if held:
                has_read.set()
                await go_on.wait()
            return found

    here = Tenancy(HoldingDatabase(database), PEPPER, manual_clock)  # type: ignore[arg-type]
    tenant = await here.create_tenant("acme")
    stored, key = await here.create_key(tenant.id, "ci")
    await here.changes.poll()
    held = True
    request = asyncio.create_task(here.authenticate(key))
    await has_read.wait()
    await here.revoke_key(tenant.id, stored.id)
    held = False
    go_on.set()
    assert (await request).tenant_id == tenant.id

    with pytest.raises(NotAuthenticated):
        await here.authenticate(key)


def holder(number: int) -> tuple[ApiKey, Tenant]:
    tenant_id = TenantId("ten_1")
    tenant = Tenant(tenant_id, "acme", TenantStatus.ACTIVE, float(number + 1), "default", 0.0)
    key = ApiKey(
        id=KeyId("key_1"),
        tenant_id=tenant_id,
        name="k",
        public_id="id",
        scopes=frozenset(),
        adapters=None,
        allowed_ips=None,
        created_at=0.0,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
        replaced_by=None,
        key_hash=b"",
    )
    return key, tenant


@given(st.lists(st.sampled_from(["change", "poll", "failed poll", "read", "land", "wait"]), max_size=40))
def test_what_is_remembered_is_never_a_second_old(steps: list[str]) -> None:
    """In any order of changes, polls, and reads that land late, a remembered row lacks no change older than a second."""
    clock, changes = ManualClock(), [0.0]
    reads: list[tuple[int, object]] = []

    async def number() -> int:
        return len(changes)

    async def run() -> None:
        access = AccessChanges(clock, number)
        keys = VerifiedKeys(clock, access, 10)
        for step in steps:
            match step:
                case "change":
                    changes.append(clock.monotonic())
                case "poll":
                    await access.poll()
                case "read":
                    reads.append((len(changes), access.state))
                case "land" if reads:
                    seen, state = reads.pop(0)
                    keys.add(b"digest", VerifiedKey(holder(seen), None), state)  # type: ignore[arg-type]
                case "wait":
                    clock.advance(0.3)
            found = keys.find(b"digest")
            if found is not None:
                seen = int(found.holder[1].weight) - 1
                assert all(clock.monotonic() - at < 1.0 for at in changes[seen:])

    asyncio.run(run())


def test_memory_is_bounded() -> None:
    """The memory holds 10,000 keys, the latest used ones."""
    clock = ManualClock()

    async def number() -> int:
        return 1

    async def fill() -> VerifiedKeys:
        access = AccessChanges(clock, number)
        keys = VerifiedKeys(clock, access, MOST_KEYS)
        await access.poll()
        for index in range(10_000):
            keys.add(index.to_bytes(4), VerifiedKey(holder(0), None), access.state)
        keys.find((0).to_bytes(4))
        keys.add(b"one more", VerifiedKey(holder(0), None), access.state)
        return keys

    keys = asyncio.run(fill())

    assert keys.find((0).to_bytes(4)) is not None
    assert keys.find((1).to_bytes(4)) is None
    assert keys.find(b"one more") is not None


async def test_limits_of_the_same_owners_are_read_once(here: Tenancy, counted: CountedDatabase) -> None:
    """The limits of a request are remembered for its tenant, key and end user together, and only where polls confirm it."""
    tenant = await here.create_tenant("acme")
    _, key = await here.create_key(tenant.id, "ci")
    principal = await here.authenticate(key)
    await here.limits.set(LimitOwner.user(tenant.id, "alice"), Quota(requests_per_minute=7))
    alice = principal.for_user("alice")
    for _ in range(2):
        await here.limits.of_active(principal)
    await here.changes.poll()
    for one in (principal, alice):
        await here.limits.of_active(one)
    counted.num_reads = 0

    for _ in range(5):
        assert [one.level for one in (await here.limits.of_active(principal)).owners] == [Level.TENANT]
        (_, of_alice) = (await here.limits.of_active(alice)).owners
        assert (of_alice.level, of_alice.quota.requests_per_minute) == (Level.USER, 7)
    assert counted.num_reads == 0


LimitChange = Callable[[Tenancy, Tenant, KeyId, OrganisationId], Awaitable[object]]
LIMIT_CHANGES: dict[str, LimitChange] = {
    "tenant": lambda one, tenant, _, __: one.limits.set(LimitOwner.tenant(tenant.id), Quota(requests_per_minute=1)),
    "key": lambda one, tenant, key, _: one.limits.set(LimitOwner.key(tenant.id, key), Quota(requests_per_minute=1)),
    "user": lambda one, tenant, _, __: one.limits.set(
        LimitOwner.user(tenant.id, "alice"), Quota(requests_per_minute=1)
    ),
    "each user": lambda one, tenant, _, __: one.limits.set(
        LimitOwner.user(tenant.id, None), Quota(requests_per_minute=1)
    ),
    "organisation": lambda one, _, __, organisation: one.limits.set(
        LimitOwner.organisation(organisation), Quota(requests_per_minute=1)
    ),
    "leaving": lambda one, tenant, _, organisation: one.organisations.remove_tenant(organisation, tenant.id),
}


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "elsewhere"])
@pytest.mark.parametrize("change", LIMIT_CHANGES)
async def test_no_change_of_limits_stays_unseen(here: Tenancy, elsewhere: Tenancy, change: str, is_here: bool) -> None:
    """A change of limits, at any level, holds at once where it was made, and after a poll on another gateway."""
    organisation = await here.organisations.create("group")
    tenant = await here.create_tenant("acme", organisation_id=organisation.id)
    await here.limits.set(LimitOwner.organisation(organisation.id), Quota(requests_per_minute=100))
    made, key = await here.create_key(tenant.id, "ci")
    alice = (await here.authenticate(key)).for_user("alice")
    await here.changes.poll()
    before = await here.limits.of_active(alice)
    assert await here.limits.of_active(alice) is before, "nothing was remembered"

    await LIMIT_CHANGES[change](here if is_here else elsewhere, tenant, made.id, organisation.id)
    if not is_here:
        await here.changes.poll()

    after = await here.limits.of_active(alice)
    limits = [owner.quota.requests_per_minute for owner in after.owners]
    assert 1 in limits or change == "leaving"
    assert (after.organisation_id is None) == (change == "leaving")


async def test_a_suspended_tenant_has_no_limits_remembered(here: Tenancy, elsewhere: Tenancy) -> None:
    """A tenant that another gateway suspends gets no request admitted after the next poll, whose limits were remembered."""
    tenant = await here.create_tenant("acme")
    _, key = await here.create_key(tenant.id, "ci")
    principal = await here.authenticate(key)
    await here.changes.poll()
    await here.limits.of_active(principal)

    await elsewhere.suspend_tenant(tenant.id)
    await here.changes.poll()

    with pytest.raises(NotPermitted):
        await here.limits.of_active(principal)
