"""Tests of people, their roles, and what they act with, on both databases."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import (
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    ValidationFailed,
)
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.keys.scopes import ALL_SCOPES
from graftwork.platform.keys.wrong_keys import WrongKeyLimit
from graftwork.platform.people.operators import Operators
from graftwork.platform.people.people import People
from graftwork.platform.people.person import Identity
from graftwork.platform.people.roles import SCOPES_OF, Grant, Role, parse_grant, parse_group_roles, role_in
from graftwork.platform.people.sign_in import SignedIn, SignIns
from graftwork.platform.tenancy.authenticator import AdminKey, Authenticator
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.tenants import Tenant, TenantStatus
from graftwork.platform.tenancy.verified_keys import RecentKeys

PEPPER = b"a pepper for tests"
ISSUER = "https://login.test"
ADDRESS = "192.0.2.1"
SESSION_S = 3600.0


class Office:
    """All that people need of one gateway."""

    def __init__(self, database: Database, clock: ManualClock, group_roles: dict[str, str] | None = None) -> None:
        self.tenancy = Tenancy(database, PEPPER, clock)
        roles = parse_group_roles((group_roles or {}).items())
        self.people = People(database, clock, self.tenancy.changes, self.tenancy.work, roles)
        self.tenancy.organisations.follow(self.people.settle_tenant)
        self.sign_ins = SignIns(database, clock, self.people, PEPPER)
        operators = Operators(database, clock, PEPPER)
        wrong, recent = WrongKeyLimit(clock, burst=1000), RecentKeys(clock)
        self.gate = Authenticator(self.tenancy, AdminKey("gwa_admin", PEPPER, clock), wrong, recent, clock, operators)
        self._numbers = itertools.count()

    def once(self) -> str:
        """A text that no sign-in has used."""
        return f"secret {next(self._numbers)}"

    async def exchange(self, subject: str = "ada", tenant: str | None = None, *groups: str) -> SignedIn:
        identity = Identity(ISSUER, subject, f"{subject}@example.com", groups)
        return await self.sign_ins.exchange(identity, self.once(), tenant, SESSION_S)

    async def act(self, token: str) -> Principal | AdminPrincipal:
        return await self.gate.authenticate_any(token, ADDRESS)


@pytest.fixture
def office(database: Database, manual_clock: ManualClock) -> Office:
    return Office(database, manual_clock)


async def test_a_stranger_is_known_after_a_sign_in_and_may_do_nothing(office: Office) -> None:
    """Somebody without a role is refused by name, and is then among the people, for an operator to grant a role."""
    with pytest.raises(NotPermitted) as caught:
        await office.exchange()

    (person,) = (await office.people.list()).items
    assert (caught.value.code, caught.value.details) == ("no_role", {"person": person.id})
    assert (person.subject, person.email, person.grants) == ("ada", "ada@example.com", frozenset())


@pytest.mark.parametrize("role", [Role.TENANT_ADMIN, Role.TENANT_MEMBER, Role.TENANT_VIEWER])
async def test_a_role_in_a_tenant_is_a_set_of_scopes(office: Office, role: Role) -> None:
    """A person with a role acts in the tenant with the role's scopes, by name, and on no operator's route."""
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(role, tenant.id))

    signed_in = await office.exchange()

    assert signed_in.operator is None
    assert signed_in.tenant is not None
    principal = await office.act(signed_in.tenant.text)
    assert isinstance(principal, Principal)
    assert (principal.tenant_id, principal.scopes) == (tenant.id, SCOPES_OF[role])
    assert (principal.person_id, principal.actor) == (person.id, person.id)
    with pytest.raises(NotPermitted):
        await office.gate.authenticate_admin(signed_in.tenant.text, ADDRESS)


async def test_operators_read_or_change(office: Office) -> None:
    """An operator may change things, a reading operator may not, and neither acts in a tenant."""
    for subject, role in (("ada", Role.OPERATOR), ("bob", Role.OPERATOR_READONLY)):
        person = await office.people.add(ISSUER, subject, None)
        await office.people.grant(person.id, Grant(role))
        signed_in = await office.exchange(subject)

        assert signed_in.operator is not None
        admin = await office.gate.authenticate_admin(signed_in.operator.text, ADDRESS)
        assert (admin.name, admin.may_change) == (person.id, role is Role.OPERATOR)
        with pytest.raises(NotPermitted):
            await office.gate.authenticate(signed_in.operator.text, ADDRESS)
    with pytest.raises(NotPermitted):
        admin.require_change()


async def test_a_role_on_an_organisation_holds_in_its_tenants(office: Office) -> None:
    """A role on an organisation holds in all its tenants, also later ones, and ends when a tenant leaves."""
    organisation = await office.tenancy.organisations.create("group")
    first = await office.tenancy.create_tenant("first", organisation_id=organisation.id)
    other = await office.tenancy.create_tenant("other")
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(Role.TENANT_MEMBER, organisation.id))
    token = (await office.exchange(tenant="first")).tenant
    later = await office.tenancy.create_tenant("later", organisation_id=organisation.id)

    _, seats = await office.people.seats(person.id)
    assert token is not None
    await office.act(token.text)
    await office.tenancy.organisations.remove_tenant(organisation.id, first.id)

    assert [seat.tenant_id for seat in seats.tenants] == [first.id, later.id]
    with pytest.raises(NotAuthenticated):
        await office.act(token.text)
    with pytest.raises(NotPermitted):
        await office.exchange(tenant=other.id)


@pytest.mark.parametrize("act", ["revoke", "suspend", "delete"])
async def test_what_a_person_has_ends_with_the_role(office: Office, database: Database, act: str) -> None:
    """Tokens as an operator and in a tenant end when roles are taken back, or the person is suspended or deleted.

    They end at another gateway too, as soon as it has read the number of changes.
    """
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", None)
    grants = [Grant(Role.OPERATOR), Grant(Role.TENANT_ADMIN, tenant.id)]
    for grant in grants:
        await office.people.grant(person.id, grant)
    signed_in = await office.exchange()
    tokens = [ticket.text for ticket in (signed_in.operator, signed_in.tenant) if ticket is not None]
    other = Office(database, ManualClock())
    await other.tenancy.changes.poll()
    for gateway, token in itertools.product((office, other), tokens):
        await gateway.act(token)

    if act == "revoke":
        for grant in grants:
            await office.people.revoke(person.id, grant)
    elif act == "suspend":
        await office.people.suspend(person.id)
    else:
        await office.people.delete(person.id)
    await other.tenancy.changes.poll()

    for gateway, token in itertools.product((office, other), tokens):
        with pytest.raises(NotAuthenticated):
            await gateway.act(token)


async def test_work_of_a_suspended_person_ends(office: Office) -> None:
    """What a person has started is cancelled by a suspension; the work of a key of the same tenant goes on."""
    tenant = await office.tenancy.create_tenant("acme")
    _, key = await office.tenancy.create_key(tenant.id, "ci")
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(Role.TENANT_MEMBER, tenant.id))
    token = (await office.exchange()).tenant
    assert token is not None
    ended: list[str] = []
    for name, text in (("person", token.text), ("key", key)):
        principal = await office.act(text)
        assert isinstance(principal, Principal)
        office.tenancy.work.add(principal, lambda _, name=name: ended.append(name))  # type: ignore[misc]

    await office.people.suspend(person.id)

    assert ended == ["person"]


async def test_a_suspension_kills_old_tokens_for_ever(office: Office) -> None:
    """After a suspension is over, tokens from before stay dead, and a new sign-in works; while it lasts, none does."""
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", None)
    for grant in (Grant(Role.OPERATOR), Grant(Role.TENANT_ADMIN, tenant.id)):
        await office.people.grant(person.id, grant)
    before = await office.exchange()
    await office.people.suspend(person.id)
    with pytest.raises(NotPermitted) as caught:
        await office.exchange()
    await office.people.resume(person.id)

    after = await office.exchange()

    assert caught.value.code == "person_suspended"
    for old, new in ((before.operator, after.operator), (before.tenant, after.tenant)):
        assert old is not None
        assert new is not None
        with pytest.raises(NotAuthenticated):
            await office.act(old.text)
        await office.act(new.text)


async def test_groups_give_and_take_roles(database: Database, manual_clock: ManualClock) -> None:
    """Roles by groups are those of the last sign-in; groups without a role are not stored."""
    plain = Office(database, manual_clock)
    tenant = await plain.tenancy.create_tenant("acme")
    office = Office(database, manual_clock, {"ops": "operator", "team": f"tenant-viewer:{tenant.id}"})
    first = await office.exchange("ada", None, "ops", "team", "choir")
    assert first.operator is not None
    assert first.tenant is not None

    second = await office.exchange("ada", None, "team")

    (person,) = (await office.people.list()).items
    assert person.groups == ("team",)
    assert second.operator is None
    with pytest.raises(NotAuthenticated):
        await office.act(first.operator.text)
    await office.act(first.tenant.text)


async def test_a_group_that_gives_no_role_any_more(database: Database, manual_clock: ManualClock) -> None:
    """A gateway that starts without a mapping ends what people had by it."""
    before = Office(database, manual_clock, {"ops": "operator"})
    signed_in = await before.exchange("ada", None, "ops")
    assert signed_in.operator is not None
    after = Office(database, manual_clock)

    await after.people.settle_all()

    with pytest.raises(NotAuthenticated):
        await after.act(signed_in.operator.text)


async def test_a_sign_in_works_once(office: Office) -> None:
    """The same ID token or state signs in once, until it is forgotten, which is after it has ended."""
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(Role.OPERATOR))
    identity, token = Identity(ISSUER, "ada"), "the same token"
    await office.sign_ins.exchange(identity, token, None, SESSION_S)

    for _ in range(2):
        with pytest.raises(NotAuthenticated) as caught:
            await office.sign_ins.exchange(identity, token, None, SESSION_S)
        await office.sign_ins.sweep()

    assert caught.value.code == "sign_in_used"


async def test_sessions_end_in_time(office: Office, manual_clock: ManualClock) -> None:
    """A console session is renewed to its end and no further, and ends sooner if the provider says so."""
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(Role.TENANT_MEMBER, tenant.id))
    now, session_s = manual_clock.now(), 3000.0
    long = await office.sign_ins.open_console(Identity(ISSUER, "ada"), office.once(), session_s)
    short = await office.sign_ins.open_console(Identity(ISSUER, "ada", ends_at=now + 600), office.once(), session_s)
    manual_clock.advance(1500)

    principal = await office.act(long.text)
    renewed = await office.gate.open_session(principal, long.text)

    assert renewed.until == now + session_s  # and not 1500 + 30 minutes
    with pytest.raises(NotAuthenticated):
        await office.act(short.text)
    manual_clock.advance(session_s - 1500)
    with pytest.raises(NotAuthenticated):
        await office.act(renewed.ticket)


async def test_tokens_of_the_command_line_cannot_be_renewed(office: Office, manual_clock: ManualClock) -> None:
    """A token that is renewed as a console's cookie still ends when it would have ended."""
    person = await office.people.add(ISSUER, "ada", None)
    await office.people.grant(person.id, Grant(Role.OPERATOR))
    token = (await office.exchange()).operator
    assert token is not None
    manual_clock.advance(SESSION_S / 2)

    renewed = await office.gate.open_session(await office.act(token.text), token.text)

    assert renewed.until == token.until


async def test_a_seat_is_not_a_key_of_the_tenant(office: Office) -> None:
    """The key with which a person acts is listed by the present name, and neither rotated nor revoked as keys are."""
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", "ada@example.com")
    await office.people.grant(person.id, Grant(Role.TENANT_MEMBER, tenant.id))
    await office.exchange()
    renamed = Identity(ISSUER, "ada", "lovelace@example.com")
    await office.sign_ins.exchange(renamed, office.once(), None, SESSION_S)
    (seat,) = (await office.tenancy.list_keys(tenant.id)).items

    assert (seat.name, seat.person_id) == ("lovelace@example.com", person.id)
    for act in (office.tenancy.rotate_key, office.tenancy.revoke_key):
        with pytest.raises(Conflict):
            await act(tenant.id, seat.id)


async def test_acts_are_in_the_audit_log(office: Office) -> None:
    """Each change of a person or role has an entry with who made it, and with the person's id alone."""
    tenant = await office.tenancy.create_tenant("acme")
    person = await office.people.add(ISSUER, "ada", "ada@example.com", actor="per_boss")
    grant = Grant(Role.TENANT_ADMIN, tenant.id)
    await office.people.grant(person.id, grant, actor="per_boss")
    await office.people.grant(person.id, grant, actor="per_boss")  # changes nothing
    await office.people.suspend(person.id, actor="per_boss")
    await office.people.resume(person.id, actor="per_boss")
    await office.people.revoke(person.id, grant, actor="per_boss")
    await office.people.delete(person.id, actor="per_boss")

    entries = [entry for entry in (await office.tenancy.audit()).items if entry.action.startswith("person.")]

    acts = ["added", "role_granted", "suspended", "resumed", "role_revoked", "deleted"]
    assert [entry.action for entry in reversed(entries)] == [f"person.{act}" for act in acts]
    assert {(entry.actor, entry.target) for entry in entries} == {("per_boss", person.id)}
    assert [entry.tenant_id for entry in entries if "role" in entry.action] == [tenant.id] * 2
    assert "ada@example.com" not in str(entries)


async def test_unknown_people_tenants_and_roles(office: Office) -> None:
    """What does not exist is NotFound; a person is added once."""
    person = await office.people.add(ISSUER, "ada", None)
    missing = [Grant(Role.TENANT_ADMIN, "ten_0"), Grant(Role.TENANT_ADMIN, "org_0")]

    with pytest.raises(Conflict):
        await office.people.add(ISSUER, "ada", None)
    for grant in missing:
        with pytest.raises(NotFound):
            await office.people.grant(person.id, grant)
    with pytest.raises(NotFound):
        await office.people.revoke(person.id, Grant(Role.OPERATOR))


TENANTS = st.builds(
    Tenant,
    id=st.sampled_from(["ten_a", "ten_b"]).map(TenantId),
    name=st.just("x"),
    status=st.just(TenantStatus.ACTIVE),
    weight=st.just(1.0),
    service_tier_ceiling=st.just("default"),
    created_at=st.just(0.0),
    organisation_id=st.sampled_from([None, "org_a", "org_b"]).map(
        lambda one: None if one is None else OrganisationId(one)
    ),
)
GRANTS = st.frozensets(
    st.one_of(
        st.sampled_from([Grant(Role.OPERATOR), Grant(Role.OPERATOR_READONLY)]),
        st.builds(
            Grant,
            st.sampled_from([Role.TENANT_ADMIN, Role.TENANT_MEMBER, Role.TENANT_VIEWER]),
            st.sampled_from(["ten_a", "ten_b", "org_a", "org_b"]),
        ),
    ),
    max_size=6,
)


@given(GRANTS, TENANTS)
def test_a_role_in_a_tenant_comes_from_a_grant_on_it(grants: frozenset[Grant], tenant: Tenant) -> None:
    """The role in a tenant is the one with most scopes that was granted on it or its organisation, and no other."""
    places = {tenant.id, tenant.organisation_id}
    allowed = [SCOPES_OF[grant.role] for grant in grants if grant.on and grant.on in places]

    role = role_in(grants, tenant)

    expected = max(allowed, key=len, default=None)
    assert (None if role is None else SCOPES_OF[role]) == expected


@given(GRANTS)
def test_grants_are_read_as_they_are_written(grants: frozenset[Grant]) -> None:
    """The text of each grant is read back as the same grant."""
    assert {parse_grant(grant.text) for grant in grants} == grants


@pytest.mark.parametrize(
    "text", ["", "king", "operator:ten_a", "tenant-admin", "tenant-admin:", "tenant-admin:acme", "tenant-admin:ten_A b"]
)
def test_a_wrong_role_is_refused(text: str) -> None:
    """A role that does not exist, or has the wrong place, is refused, in a request and in the settings."""
    with pytest.raises(ValidationFailed):
        parse_grant(text)
    with pytest.raises(InvalidRequest, match="oidc_roles"):
        parse_group_roles([("group", text)])


def test_every_scope_of_a_role_is_one_of_a_key() -> None:
    """Roles have no permission that keys do not have."""
    assert all(scopes <= ALL_SCOPES for scopes in SCOPES_OF.values())
