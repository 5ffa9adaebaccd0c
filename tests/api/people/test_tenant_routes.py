"""Tests of what a tenant's own people may do with its keys and members: a tenant-admin, and nobody else."""

import pytest

from graftwork.platform.ids import TenantId
from graftwork.platform.people.person import Identity
from graftwork.platform.people.roles import parse_grant
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.api.routes.test_limits import organisation_of
from tests.api.signed_in import CSRF, sign_in_person


async def person_in(gateway: Gateway, tenant_id: TenantId, role: str = "tenant-admin") -> TestTenant:
    """Somebody new who has signed in with a role in the tenant."""
    client = gateway.client("")
    await sign_in_person(gateway, client, f"{role}:{tenant_id}")
    return TestTenant(tenant_id, "", client)


async def test_a_tenant_admin_manages_the_keys(gateway: Gateway, tenant: TestTenant) -> None:
    """A tenant-admin makes a key that works with its scopes, rotates and revokes it, and the audit log names the person."""
    ada = await person_in(gateway, tenant.id)
    me = (await ada.client.get("/v1/auth/whoami")).json()["person"]["id"]

    made = await ada.client.post("/v1/keys", json={"name": "ci", "scopes": ["usage"]})
    first = gateway.client(made.json()["key"])
    works = [(await first.get(path)).status_code for path in ("/v1/usage", "/v1/sessions")]
    rotated = await ada.client.post(f"/v1/keys/{made.json()['id']}/rotate")
    second = gateway.client(rotated.json()["key"])
    after = [(await client.get("/v1/usage")).status_code for client in (first, second)]
    revoked = await ada.client.delete(f"/v1/keys/{rotated.json()['id']}")
    listed = (await ada.client.get("/v1/keys")).json()["data"]

    assert (made.status_code, rotated.status_code, revoked.status_code) == (201, 200, 200)
    assert (works, after) == ([200, 403], [401, 200])
    assert (await second.get("/v1/usage")).status_code == 401
    assert {made.json()["id"], rotated.json()["id"]} <= {key["id"] for key in listed}
    assert all("key" not in key for key in listed)
    log = (await gateway.admin.get("/v1/admin/audit?limit=3")).json()["data"]
    assert [entry["action"] for entry in log] == ["key.revoked", "key.rotated", "key.created"]
    assert {(entry["actor"], entry["tenant_id"]) for entry in log} == {(me, tenant.id)}


@pytest.mark.parametrize("role", ["tenant-member", "tenant-viewer"])
async def test_other_roles_and_keys_may_not(gateway: Gateway, tenant: TestTenant, role: str) -> None:
    """Members, viewers and keys with all scopes, also in the console, neither see nor change keys and members."""
    member = await person_in(gateway, tenant.id, role)
    key = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys?order=asc")).json()["data"][0]["id"]
    for client in (member.client, tenant.client):
        answers = [
            await client.get("/v1/keys"),
            await client.get("/v1/members"),
            await client.post("/v1/keys", json={"name": "mine"}),
            await client.post(f"/v1/keys/{key}/rotate"),
            await client.delete(f"/v1/keys/{key}"),
        ]

        assert {(one.status_code, one.json()["error"]["code"]) for one in answers} == {(403, "not_tenant_admin")}
    assert (await gateway.admin.get("/v1/models")).status_code == 403
    assert (await tenant.client.get("/v1/models")).status_code == 200


async def test_a_repeated_request_makes_one_key(gateway: Gateway, tenant: TestTenant) -> None:
    """A creation that is sent again makes no second key, and the stored answer has no secret."""
    ada = await person_in(gateway, tenant.id)
    again = {"idempotency-key": "once"}

    first, second = [await ada.client.post("/v1/keys", json={"name": "ci"}, headers=again) for _ in range(2)]

    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["key"].startswith("gw_")
    assert second.json() == first.json() | {"key": None}
    assert [key["name"] for key in (await ada.client.get("/v1/keys")).json()["data"]].count("ci") == 1


async def test_who_loses_the_role_loses_the_keys(gateway: Gateway, tenant: TestTenant) -> None:
    """After the role is taken back or lowered, the next request to manage keys is refused."""
    client = gateway.client("")
    person = await sign_in_person(gateway, client, f"tenant-admin:{tenant.id}", f"tenant-viewer:{tenant.id}")
    before = await client.get("/v1/keys")

    await gateway.resources.people.people.revoke(person.id, parse_grant(f"tenant-admin:{tenant.id}"))
    lowered = await client.get("/v1/keys")
    await gateway.resources.people.people.suspend(person.id)
    suspended = await client.get("/v1/keys")

    assert [answer.status_code for answer in (before, lowered, suspended)] == [200, 403, 401]


async def test_the_keys_of_people_stay_with_their_roles(gateway: Gateway, tenant: TestTenant) -> None:
    """The key with which a member acts is listed with the person, and neither rotated nor revoked; a change needs the
    console's token.
    """
    ada = await person_in(gateway, tenant.id)
    me = (await ada.client.get("/v1/auth/whoami")).json()
    seat, listed = me["key_id"], (await ada.client.get("/v1/keys")).json()["data"]

    refused = [await ada.client.post(f"/v1/keys/{seat}/rotate"), await ada.client.delete(f"/v1/keys/{seat}")]
    del ada.client.headers[CSRF]
    forged = await ada.client.post("/v1/keys", json={"name": "forged"})

    assert {(key["name"] == "first", key["person_id"]) for key in listed} == {(True, None), (False, me["person"]["id"])}
    assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(409, "key_of_person")}
    assert forged.status_code == 403


async def test_members_are_those_with_a_role(gateway: Gateway, tenant: TestTenant) -> None:
    """The members of a tenant are the people with a role there or by its organisation, in pages, with the strongest role;
    nobody sees those of another tenant, nor the operator's people.
    """
    other, people = await gateway.tenant("Other"), gateway.resources.people.people
    organisation = await organisation_of(gateway, tenant)
    grants = {
        "ada": [f"tenant-admin:{tenant.id}", f"tenant-viewer:{tenant.id}"],
        "bob": [f"tenant-viewer:{tenant.id}"],
        "eve": [f"tenant-admin:{other.id}"],
        "oli": ["operator"],
        "org": [f"tenant-member:{organisation}"],
        "new": [],
    }
    for name, roles in grants.items():
        identity = Identity("https://login.test", name)
        person = await people.add(identity.issuer, identity.subject, f"{name}@example.com" if name != "bob" else None)
        for role in roles:
            await people.grant(person.id, parse_grant(role))
        if name == "bob":
            await people.suspend(person.id)
    admin = await person_in(gateway, tenant.id)

    first = (await admin.client.get("/v1/members?order=asc&limit=2")).json()
    rest = (await admin.client.get(f"/v1/members?order=asc&limit=9&after={first['last_id']}")).json()
    newest = (await admin.client.get("/v1/members?limit=1")).json()["data"][0]["id"]

    shown = [(one["name"], one["role"], one["status"]) for one in (*first["data"], *rest["data"])]
    assert shown[:3] == [
        ("ada@example.com", "tenant-admin", "active"),
        ("bob", "tenant-viewer", "suspended"),
        ("org@example.com", "tenant-member", "active"),
    ]
    assert len(shown) == 4  # and the tenant-admin who asks
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert newest == rest["data"][-1]["id"]
    assert set(first["data"][0]) == {"id", "object", "name", "role", "status", "signed_in_at"}
