"""Tests of what keys with fewer rights may do: scopes on every route, models, addresses, and cookies of such keys."""

import re
from collections.abc import Iterator

import httpx
import pytest

from graftwork.platform.keys.scopes import Scope
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat
from tests.api.signed_in import signed_in

FREE = re.compile(r"GET /v1/(adapters|adapter_uploads|models|requests|auth/whoami)\b.*|POST /v1/auth/tokens")
SIGNED_IN = re.compile(r"(GET|POST|DELETE) /v1/(keys|members)\b.*")
"""What no key may do, whatever its scopes: only a person who has signed in as a tenant-admin."""
NEEDED = {
    Scope.ADAPTERS: re.compile(r"(POST|PUT|PATCH|DELETE) /v1/(adapters|adapter_uploads)\b.*"),
    Scope.USAGE: re.compile(r"GET /v1/(usage|quota|prices|overview|invoices?|retention)\b.*"),
    Scope.READ: re.compile(r"GET /v1/(sessions|responses|conversations|files|batches|messages/batches)\b.*"),
    Scope.EXPORT: re.compile(r"(GET|POST|DELETE) /v1/exports\b.*"),
    Scope.INFERENCE: re.compile(
        r"(POST|PATCH|DELETE) "
        r"/v1/(sessions|responses|conversations|chat|completions|embeddings|messages|tokenize|detokenize|files|batches)\b.*"
    ),
}


def routes(gateway: Gateway) -> Iterator[tuple[str, str]]:
    """(method, path) of every route of the OpenAPI document that takes a tenant's key."""
    for path, operations in gateway.app.openapi()["paths"].items():
        if path.startswith("/v1/") and not path.startswith("/v1/admin"):
            yield from ((method.upper(), path) for method in operations)


async def key_with(gateway: Gateway, tenant: TestTenant, **rules: list[str]) -> str:
    _, key = await gateway.resources.account.tenancy.create_key(tenant.id, "few", **rules)  # type: ignore[arg-type]
    return key


async def send(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    filled = re.sub(r"{(version|month)}", "1", path)
    filled = re.sub(r"{\w+}", "any", filled)
    if method == "POST" and path in ("/v1/adapters", "/v1/adapters/{name}/versions"):
        return await client.post(filled, data={"name": "any"}, files=adapter_upload(1))
    if (method, path) == ("POST", "/v1/files"):
        return await client.post(filled, data={"purpose": "batch"}, files={"file": ("any", b"{}")})
    return await client.request(method, filled)


@pytest.mark.parametrize("has_cookie", [False, True], ids=["key", "cookie"])
async def test_every_route_needs_its_scope(gateway: Gateway, tenant: TestTenant, has_cookie: bool) -> None:
    """A key without scopes gets a 403 on each route that needs one, and the message names it. A cookie is no way around.

    A route that is in no group fails the test.
    """
    key = await key_with(gateway, tenant, scopes=[])
    found = list(routes(gateway))
    async with signed_in(gateway, key) if has_cookie else gateway.client(key) as client:
        for method, path in found:
            needed = [scope for scope, pattern in NEEDED.items() if pattern.fullmatch(f"{method} {path}")]
            answer = await send(client, method, path)
            if SIGNED_IN.fullmatch(f"{method} {path}"):
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_tenant_admin"), (method, path)
                continue
            if FREE.fullmatch(f"{method} {path}"):
                assert not needed
                assert answer.status_code in (200, 404), (method, path, answer.text)
                continue
            assert len(needed) == 1, f"{method} {path} is in no group of routes: name the scope that it needs."
            error = answer.json()["error"]
            said = (answer.status_code, error.get("code", "missing_scope"))
            assert said == (403, "missing_scope"), (method, path, answer.text)
            assert f"'{needed[0]}'" in error["message"], (method, path)
    assert len(found) > 40


@pytest.mark.parametrize("scope", list(Scope))
async def test_one_scope_opens_one_group(gateway: Gateway, tenant: TestTenant, scope: Scope) -> None:
    """A key with one scope is let in on the routes of its group, and with `inference` also to read; elsewhere it is not."""
    client = gateway.client(await key_with(gateway, tenant, scopes=[str(scope)]))
    opened = {scope, Scope.READ} if scope is Scope.INFERENCE else {scope}
    for method, path in routes(gateway):
        needed = next((one for one, pattern in NEEDED.items() if pattern.fullmatch(f"{method} {path}")), None)
        is_refused = (await send(client, method, path)).status_code == 403

        is_for_people = SIGNED_IN.fullmatch(f"{method} {path}") is not None
        assert is_refused == (is_for_people or (needed is not None and needed not in opened)), (method, path)


async def test_a_key_uses_its_models_only(gateway: Gateway, tenant: TestTenant) -> None:
    """A key with a list of adapters uses, sees and changes those alone; everything else is a 403 that says so."""
    for number, name in enumerate(("pirate", "poet")):
        await tenant.push_adapter(name, seed=number)
        await tenant.client.put(f"/v1/adapters/{name}/aliases/prod", json={"version": 1})
    session = (await tenant.client.post("/v1/sessions", json={"model": "poet"})).json()["id"]
    own = gateway.client(await key_with(gateway, tenant, adapters=["pirate"]))

    mixture = [{"model": "pirate", "weight": 1}, {"model": "poet", "weight": 1}]
    refused = [
        await own.post("/v1/chat/completions", json=chat(model="poet")),
        await own.post("/v1/chat/completions", json=chat(model="nobodys")),
        await own.post("/v1/chat/completions", json=chat()),
        await own.post("/v1/completions", json={"model": "poet@prod", "prompt": "x"}),
        await own.post("/v1/completions", json={"model": "tiny", "prompt": "x", "adapters": mixture}),
        await own.post("/v1/messages", json={"model": "poet", "max_tokens": 1, "messages": chat()["messages"]}),
        await own.post("/v1/responses", json={"model": "poet@1", "input": "x"}),
        await own.post("/v1/sessions", json={"model": "poet"}),
        await own.post(f"/v1/sessions/{session}/turns", json={"input": "x"}),
        await own.get("/v1/models/poet"),
        await own.get("/v1/adapters/poet"),
        await own.delete("/v1/adapters/poet"),
        await own.delete("/v1/adapters/poet/versions/1"),
        await own.put("/v1/adapters/poet/aliases/prod", json={"version": 1}),
        await own.delete("/v1/adapters/poet/aliases/prod"),
        await own.post("/v1/adapters", data={"name": "poet"}, files=adapter_upload(3)),
        await own.post("/v1/adapters/poet/versions", files=adapter_upload(3)),
    ]
    mine = (await own.post("/v1/sessions", json={"model": "pirate@prod"})).json()["id"]
    refused.append(await own.patch(f"/v1/sessions/{mine}", json={"model": "poet"}))
    conversation = (await own.post("/v1/conversations", json={})).json()["id"]
    allowed = [
        await own.post("/v1/completions", json={"model": "pirate@1", "prompt": "x"}),
        await own.post(f"/v1/sessions/{mine}/turns", json={"input": "x"}),
        await own.post("/v1/responses", json={"model": "pirate", "input": "x", "conversation": conversation}),
        await own.get(f"/v1/sessions/{session}"),
    ]

    for answer in refused:
        assert answer.status_code == 403, (answer.request.url.path, answer.text)
        assert "'pirate'" in answer.json()["error"]["message"]
    assert [answer.status_code for answer in allowed] == [200] * 4, [answer.text for answer in allowed]
    assert [one["name"] for one in (await own.get("/v1/adapters")).json()["data"]] == ["pirate"]
    assert [one["id"] for one in (await own.get("/v1/models")).json()["data"]] == ["pirate", "pirate@prod"]
    assert len((await tenant.client.get("/v1/models")).json()["data"]) == 5


async def test_addresses_over_http(gateway: Gateway, tenant: TestTenant) -> None:
    """A key, and the cookie that was made with it, work from the networks of the key, by the connection's address."""
    key = await key_with(gateway, tenant, allowed_ips=["192.0.2.0/24", "2001:db8::/32"])

    async def ask(address: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=gateway.app, client=(address, 5000))
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": "192.0.2.1"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test", headers=headers) as client:
            signed = await client.post("/console/session")
            if signed.status_code == 201:
                del client.headers["authorization"]
            return await client.get("/v1/models")

    for address in ("192.0.2.77", "2001:db8::5", "::ffff:192.0.2.3"):
        assert (await ask(address)).status_code == 200
    for address in ("198.51.100.1", "2001:db9::5"):
        answer = await ask(address)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "address_not_allowed")
        assert "x-forwarded-for" not in answer.text


@pytest.mark.parametrize("field", [{"scopes": ["all"]}, {"adapters": ["a@1"]}, {"allowed_ips": ["10.0.0.1/8"]}])
async def test_wrong_rules_are_named(gateway: Gateway, tenant: TestTenant, field: dict[str, list[str]]) -> None:
    """A wrong rule of a new key is a 422 that names the field, and makes no key."""
    path = f"/v1/admin/tenants/{tenant.id}/keys"

    answer = await gateway.admin.post(path, json={"name": "k", **field})

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, next(iter(field)))
    assert len((await gateway.admin.get(path)).json()["data"]) == 1
