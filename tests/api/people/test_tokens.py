"""Tests of the exchange of ID tokens for tokens of the server, and of the operator's routes for people."""

from typing import Any

import pytest

from tests.api.in_process_gateway import chat
from tests.api.people.conftest import SignInDesk
from tests.identity_provider import CLI, CONSOLE


async def test_an_id_token_gives_tokens_for_both_kinds_of_routes(desk: SignInDesk) -> None:
    """A person with two roles gets a token for each, beside which keys go on working."""
    tenant = await desk.gateway.tenant("Acme")
    person = await desk.person("ada", "operator", f"tenant-member:{tenant.id}")

    answer = (await desk.exchange("ada")).json()

    in_tenant, operator = (desk.gateway.client(answer[kind]["access_token"]) for kind in ("tenant", "operator"))
    assert (answer["person"]["id"], answer["tenant_id"]) == (person.id, tenant.id)
    assert answer["tenant"]["expires_at"] == int(desk.gateway.clock.now()) + 900
    assert (await in_tenant.post("/v1/chat/completions", json=chat())).status_code == 200
    assert (await operator.get("/v1/admin/tenants")).status_code == 200
    assert (await operator.post("/v1/chat/completions", json=chat())).status_code == 403
    assert (await in_tenant.get("/v1/admin/tenants")).status_code == 403
    assert (await tenant.client.get("/v1/models")).status_code == 200
    shown = (await in_tenant.get("/v1/auth/whoami")).json()
    assert (shown["kind"], shown["acts_as"], shown["person"]["email"]) == ("person", "tenant", "ada@example.com")
    assert shown["tenants"] == [{"id": tenant.id, "object": "tenant.seat", "name": "Acme", "role": "tenant-member"}]
    usage = (await tenant.client.get("/v1/usage?group_by=key")).json()["data"]
    assert shown["key_id"] in {row["group"] for row in usage}


async def test_the_audit_log_has_who_got_tokens(desk: SignInDesk) -> None:
    """Each exchange that gives tokens is an entry with the person and what the tokens act as; a refused one is none."""
    tenant = await desk.gateway.tenant("Acme")
    person = await desk.person("ada", f"tenant-member:{tenant.id}")
    await desk.exchange("ada")
    refused = await desk.exchange("ada", "ten_unknown")
    await desk.exchange("ada", tenant.id)

    log = (await desk.gateway.admin.get("/v1/admin/audit?limit=100")).json()["data"]

    entries = [entry for entry in log if entry["action"] == "person.tokens_issued"]
    assert refused.status_code == 403
    assert [(entry["actor"], entry["target"]) for entry in entries] == [(person.id, person.id)] * 2
    assert [entry["details"] for entry in entries] == [{"operator": False, "tenant_id": tenant.id}] * 2


async def test_tokens_end(desk: SignInDesk) -> None:
    """A token ends after its time."""
    await desk.person("ada", "operator")
    token = (await desk.exchange("ada")).json()["operator"]["access_token"]
    desk.gateway.clock.advance(900)

    answer = await desk.gateway.client(token).get("/v1/admin/tenants")

    assert answer.status_code == 401


async def test_the_tenant_is_chosen_by_id_or_name(desk: SignInDesk) -> None:
    """With several tenants none is chosen silently; a foreign one is refused like an unknown one."""
    first, second, foreign = [await desk.gateway.tenant(name) for name in ("First", "Second", "Foreign")]
    await desk.person("ada", f"tenant-viewer:{first.id}", f"tenant-viewer:{second.id}")

    unnamed = (await desk.exchange("ada")).json()
    chosen = [(await desk.exchange("ada", wanted)).json()["tenant_id"] for wanted in (second.id, "First")]
    refused = [await desk.exchange("ada", wanted) for wanted in (foreign.id, "Foreign", "ten_unknown")]

    assert (unnamed["tenant"], len(unnamed["tenants"])) == (None, 2)
    assert chosen == [second.id, first.id]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in refused] == [(403, "no_role")] * 3
    assert foreign.id not in refused[1].text


WRONG: dict[str, dict[str, Any]] = {
    "the console's client": {"aud": CONSOLE},
    "another issuer": {"iss": "https://evil.test"},
    "expired": {"exp": 0},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_token_gets_nothing(desk: SignInDesk, wrong: str) -> None:
    """A token of another client or issuer, or one that has ended, is a 401."""
    await desk.person("ada", "operator")
    desk.provider.claims = WRONG[wrong]

    assert (await desk.exchange("ada")).status_code == 401


async def test_wrong_tokens_are_limited_as_wrong_keys_are(desk: SignInDesk) -> None:
    """After twenty wrong tokens an address waits, and its person can sign in when it has waited."""
    await desk.person("ada", "operator")
    desk.provider.claims = {"aud": CONSOLE}
    statuses = [(await desk.exchange("ada")).status_code for _ in range(21)]
    desk.provider.claims = {}
    desk.gateway.clock.advance(60)

    assert statuses == [401] * 20 + [429]
    assert (await desk.exchange("ada")).status_code == 200


async def test_an_id_token_is_exchanged_once_and_is_no_key(desk: SignInDesk) -> None:
    """The same ID token a second time is a 401, and so it is as a key."""
    await desk.person("ada", "operator")
    token = desk.provider.token(CLI)
    client = desk.gateway.client(token)
    first, second = [await client.post("/v1/auth/tokens") for _ in range(2)]
    as_key = [await client.get(path) for path in ("/v1/models", "/v1/admin/tenants")]

    assert (first.status_code, second.status_code) == (200, 401)
    assert second.json()["error"]["code"] == "sign_in_used"
    assert [answer.status_code for answer in as_key] == [401, 401]


async def test_people_are_managed_over_http(desk: SignInDesk) -> None:
    """An operator adds, finds, grants, revokes, suspends, resumes and deletes over HTTP."""
    admin, tenant = desk.gateway.admin, await desk.gateway.tenant()
    added = (await admin.post("/v1/admin/people", json={"subject": "ada", "email": "ada@example.com"})).json()
    path, role = f"/v1/admin/people/{added['id']}", f"tenant-admin:{tenant.id}"

    granted = (await admin.post(f"{path}/roles", json={"role": role})).json()
    found = (await admin.get("/v1/admin/people", params={"email": "ada@example.com"})).json()["data"]
    suspended = (await admin.post(f"{path}/suspend")).json()
    resumed = (await admin.post(f"{path}/resume")).json()
    revoked = (await admin.delete(f"{path}/roles/{role}")).json()
    gone = (await admin.delete(path)).json()

    assert (granted["roles"], [one["id"] for one in found]) == ([role], [added["id"]])
    assert (suspended["status"], resumed["status"], revoked["roles"]) == ("suspended", "active", [])
    assert gone == {"id": added["id"], "object": "person.deleted", "deleted": True}
    assert (await admin.get(path)).status_code == 404
    for wrong in ("king", "tenant-admin", "operator:x"):
        assert (await admin.post(f"{path}/roles", json={"role": wrong})).status_code == 422


async def test_roles_in_a_deleted_tenant_are_erased(desk: SignInDesk) -> None:
    """A tenant's deletion ends the tokens of its people, and its erasure takes their roles there."""
    tenant, kept = await desk.gateway.tenant(), await desk.gateway.tenant("Kept")
    person = await desk.person("ada", f"tenant-admin:{tenant.id}", f"tenant-viewer:{kept.id}")
    token = (await desk.exchange("ada", tenant.id)).json()["tenant"]["access_token"]
    await desk.gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")

    await desk.gateway.resources.admin.erasure.sweep()

    assert (await desk.gateway.client(token).get("/v1/models")).status_code == 401
    shown = (await desk.gateway.admin.get(f"/v1/admin/people/{person.id}")).json()
    assert shown["roles"] == [f"tenant-viewer:{kept.id}"]
