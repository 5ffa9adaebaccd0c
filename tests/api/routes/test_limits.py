"""Tests of limits at all levels on the routes: organisations, tenants, keys and end users, with money and webhooks."""

from decimal import Decimal
from typing import Any

import httpx
import pytest

from graftwork.platform.quotas.limits import LIMIT_HEADER
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.api.routes.test_costs import set_prices

CHAT = "/v1/chat/completions"


async def put(gateway: Gateway, path: str, **body: Any) -> dict[str, Any]:
    answer = await gateway.admin.put(f"/v1/admin/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def organisation_of(gateway: Gateway, *tenants: TestTenant) -> str:
    """A new organisation with these tenants."""
    made = (await gateway.admin.post("/v1/admin/organisations", json={"name": "Group"})).json()
    for tenant in tenants:
        moved = await put(gateway, f"organisations/{made['id']}/tenants/{tenant.id}")
        assert moved["organisation_id"] == made["id"]
    return str(made["id"])


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert answer.headers[LIMIT_HEADER] == f"{error['level']}.{error['limit']}"
    return answer.status_code, error["level"], error["limit"]


async def test_organisations_from_birth_to_end(gateway: Gateway, tenant: TestTenant) -> None:
    """An organisation is made, renamed, gets and loses tenants, and is deleted only when it has none."""
    admin, path = gateway.admin, "/v1/admin/organisations"
    organisation = await organisation_of(gateway, tenant)
    born = (await admin.post("/v1/admin/tenants", json={"name": "B", "organisation_id": organisation})).json()
    renamed = await admin.patch(f"{path}/{organisation}", json={"name": "Holding"})
    tenants = (await admin.get(f"{path}/{organisation}/tenants?order=asc")).json()["data"]
    refused = await admin.delete(f"{path}/{organisation}")
    left = await admin.delete(f"{path}/{organisation}/tenants/{tenant.id}")
    again = await admin.delete(f"{path}/{organisation}/tenants/{tenant.id}")
    await admin.delete(f"/v1/admin/tenants/{born['id']}")
    deleted = await admin.delete(f"{path}/{organisation}")

    assert renamed.json()["name"] == "Holding"
    assert [one["id"] for one in tenants] == [tenant.id, born["id"]]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "organisation_not_empty")
    assert left.json()["organisation_id"] is None
    assert again.status_code == 404
    assert deleted.json() == {"id": organisation, "object": "organisation.deleted", "deleted": True}
    assert (await admin.get(f"{path}/{organisation}")).status_code == 404
    unknown = await admin.post("/v1/admin/tenants", json={"name": "C", "organisation_id": organisation})
    assert unknown.status_code == 404
    actions = [entry["action"] for entry in (await admin.get("/v1/admin/audit?limit=100")).json()["data"]]
    assert {"organisation.created", "organisation.updated", "organisation.deleted", "tenant.moved"} <= set(actions)


async def test_each_level_refuses_and_says_so(gateway: Gateway, tenant: TestTenant) -> None:
    """A limit of one request at any level refuses the second one with a 429 that names the level and when to retry."""
    organisation = await organisation_of(gateway, tenant)
    key = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]["id"]
    levels = {
        "organisation": f"organisations/{organisation}/quota",
        "tenant": f"tenants/{tenant.id}/quota",
        "key": f"tenants/{tenant.id}/keys/{key}/quota",
        "user": f"tenants/{tenant.id}/user_quota?user=alice",
    }
    for level, path in levels.items():
        gateway.clock.advance(61)
        await put(gateway, path, requests_per_minute=1)
        first = await tenant.client.post(CHAT, json=chat(user="alice"))
        second = await tenant.client.post(CHAT, json=chat(user="alice"))
        lifted = await put(gateway, path)

        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert refusal(second) == (429, level, "requests_per_minute")
        assert second.headers["retry-after"] == "60"
        assert lifted["requests_per_minute"] is None
        assert (await tenant.client.post(CHAT, json=chat(user="alice"))).status_code == 200


async def test_a_rotation_keeps_a_keys_limits(gateway: Gateway, tenant: TestTenant) -> None:
    """The key that replaces another one has its limits, so a rotation lifts none."""
    keys = f"tenants/{tenant.id}/keys"
    key = (await gateway.admin.get(f"/v1/admin/{keys}")).json()["data"][0]["id"]
    await put(gateway, f"{keys}/{key}/quota", requests_per_minute=0)

    new = (await gateway.admin.post(f"/v1/admin/{keys}/{key}/rotate")).json()

    assert (await gateway.admin.get(f"/v1/admin/{keys}/{new['id']}/quota")).json()["requests_per_minute"] == 0
    assert refusal(await gateway.client(new["key"]).post(CHAT, json=chat())) == (429, "key", "requests_per_minute")


async def test_keys_of_one_line_share_what_they_may_use(gateway: Gateway, tenant: TestTenant) -> None:
    """Requests, tokens and money of a key and of its successors count together, and a new limit of one is that of all."""
    keys = f"tenants/{tenant.id}/keys"
    key_ids = [(await gateway.admin.get(f"/v1/admin/{keys}")).json()["data"][0]["id"]]
    clients = [tenant.client]
    await put(gateway, f"{keys}/{key_ids[0]}/quota", requests_per_minute=4, monthly_tokens=100_000)
    for _ in range(2):
        assert (await clients[-1].post(CHAT, json=chat())).status_code == 200
        rotated = await gateway.admin.post(f"/v1/admin/{keys}/{key_ids[-1]}/rotate", json={"overlap_s": 60})
        key_ids.append(rotated.json()["id"])
        clients.append(gateway.client(rotated.json()["key"]))

    admitted = [await client.post(CHAT, json=chat()) for client in clients]
    found = [(await gateway.admin.get(f"/v1/admin/{keys}/{key_id}/quota")).json() for key_id in key_ids]
    await put(gateway, f"{keys}/{key_ids[1]}/quota", monthly_tokens=found[0]["used"]["monthly_tokens"])
    spent = [await client.post(CHAT, json=chat()) for client in clients]

    assert [answer.status_code for answer in admitted] == [200, 200, 429]
    assert refusal(admitted[2]) == (429, "key", "requests_per_minute")
    assert found[0] == found[1] == found[2]
    usage = [answer.json()["usage"]["total_tokens"] for answer in admitted[:2]]
    assert found[0]["used"]["monthly_tokens"] == 2 * sum(usage)
    assert [refusal(answer) for answer in spent] == [(429, "key", "monthly_tokens")] * 3


async def test_end_users_are_told_apart(gateway: Gateway, tenant: TestTenant) -> None:
    """Each end user has the limits of all, one may have its own, and requests without a user have none."""
    path = f"tenants/{tenant.id}/user_quota"
    await put(gateway, path, requests_per_minute=1)
    await put(gateway, f"{path}?user=bob", requests_per_minute=2)

    async def admitted(**fields: Any) -> int:
        answers = [await tenant.client.post(CHAT, json=chat(**fields)) for _ in range(3)]
        return sum(answer.status_code == 200 for answer in answers)

    assert await admitted(user="alice") == 1
    assert await admitted(safety_identifier="carol") == 1
    assert await admitted(user="bob") == 2
    assert await admitted() == 3
    response = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "x", "user": "alice"})
    assert refusal(response) == (429, "user", "requests_per_minute")
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    turns = [{"input": "Hi", "user": user} for user in ("alice", "dave", "dave")] + [{"input": "Hi"}]
    answers = [await tenant.client.post(f"/v1/sessions/{session}/turns", json=turn) for turn in turns]
    assert [answer.status_code for answer in answers] == [429, 200, 429, 200]
    assert refusal(answers[2]) == (429, "user", "requests_per_minute")


async def test_a_budget_of_money_is_kept_to_the_cent(gateway: Gateway, tenant: TestTenant) -> None:
    """Requests are admitted while the spent cost and the highest cost of the next fit; then a 429 says not to retry."""
    await set_prices(gateway, rates={"input": "1000", "output": "2000"})
    first = await tenant.client.post(CHAT, json=chat(max_tokens=4))
    usage = first.json()["usage"]
    prompt = usage["prompt_tokens"]
    spent = Decimal(1000 * prompt + 2000 * usage["completion_tokens"]) / 10**6
    highest = Decimal(1000 * prompt + 2000 * 4) / 10**6
    exactly, less = f"{spent + highest:f}", f"{spent + highest - Decimal('0.000001'):f}"
    path = f"tenants/{tenant.id}/quota"

    await put(gateway, path, monthly_budget=less, currency="USD")
    refused = await tenant.client.post(CHAT, json=chat(max_tokens=4))
    await put(gateway, path, monthly_budget=exactly, currency="USD")
    fitting = await tenant.client.post(CHAT, json=chat(max_tokens=4))
    spent_now = await tenant.client.post(CHAT, json=chat(max_tokens=4))

    assert refusal(refused) == (429, "tenant", "monthly_budget")
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["type"] == "insufficient_quota"
    assert fitting.status_code == 200
    assert refusal(spent_now) == (429, "tenant", "monthly_budget")


async def test_turns_count_for_the_organisations_budget(gateway: Gateway, tenant: TestTenant) -> None:
    """What one tenant's turns cost leaves less to another tenant of the organisation."""
    await set_prices(gateway)
    other = await gateway.tenant("Other")
    organisation = await organisation_of(gateway, tenant, other)
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    turn = (await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x"})).json()
    cost = Decimal(turn["usage"]["cost"]["amount"]).quantize(Decimal("0.000001"))
    await put(gateway, f"organisations/{organisation}/quota", monthly_budget=f"{cost:f}", currency="USD")

    refused = await other.client.post(CHAT, json=chat())

    assert refusal(refused) == (429, "organisation", "monthly_budget")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"monthly_budget": 100, "currency": "USD"}, "monthly_budget"),
        ({"monthly_budget": "1e3", "currency": "USD"}, "monthly_budget"),
        ({"monthly_budget": "-1", "currency": "USD"}, "monthly_budget"),
        ({"soft_budget": "0.0000001", "currency": "USD"}, "soft_budget"),
        ({"monthly_budget": "100"}, "currency"),
        ({"monthly_budget": "100", "currency": "dollars"}, "currency"),
        ({"max_file_bytes": 3}, "max_file_bytes"),
        ({"monthly_dollars": "3"}, "monthly_dollars"),
    ],
)
async def test_wrong_limits_are_named(gateway: Gateway, tenant: TestTenant, body: dict[str, Any], param: str) -> None:
    """A budget that is no exact amount, or a limit that the level cannot have, is a 422 that names it."""
    organisation = await organisation_of(gateway, tenant)

    answer = await gateway.admin.put(f"/v1/admin/organisations/{organisation}/quota", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


async def test_webhooks_show_their_secret_once(gateway: Gateway, tenant: TestTenant) -> None:
    """Setting a webhook answers a new secret each time; nothing else answers one."""
    organisation = await organisation_of(gateway, tenant)
    for path in (f"tenants/{tenant.id}/webhook", f"organisations/{organisation}/webhook"):
        none = await gateway.admin.get(f"/v1/admin/{path}")
        first = await put(gateway, path, url="https://hooks.example.com/a")
        second = await put(gateway, path, url="https://hooks.example.com/b")
        shown = (await gateway.admin.get(f"/v1/admin/{path}")).json()
        wrong = await gateway.admin.put(f"/v1/admin/{path}", json={"url": "ftp://hooks.example.com/"})
        deleted = await gateway.admin.delete(f"/v1/admin/{path}")

        assert none.status_code == 404
        assert first["secret"].startswith("whsec_")
        assert first["secret"] != second["secret"]
        assert shown == {name: value for name, value in second.items() if name != "secret"}
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "url")
        assert deleted.status_code == 200
        assert (await gateway.admin.delete(f"/v1/admin/{path}")).status_code == 404


async def test_ids_of_nobody_are_404(gateway: Gateway, tenant: TestTenant) -> None:
    """Limits of an unknown organisation, tenant or key, and of a key of another tenant, do not exist."""
    other = await gateway.tenant("Other")
    key = (await gateway.admin.get(f"/v1/admin/tenants/{other.id}/keys")).json()["data"][0]["id"]
    paths = (
        "organisations/org_x/quota",
        "tenants/ten_x/quota",
        "tenants/ten_x/user_quota?user=a",
        f"tenants/{tenant.id}/keys/{key}/quota",
        f"tenants/{tenant.id}/keys/key_x/quota",
        "organisations/org_x/webhook",
        "tenants/ten_x/webhook",
    )
    for path in paths:
        body = {"url": "https://hooks.example.com/"} if path.endswith("webhook") else {}
        answers = [
            await gateway.admin.get(f"/v1/admin/{path}"),
            await gateway.admin.put(f"/v1/admin/{path}", json=body),
        ]
        assert [answer.status_code for answer in answers] == [404, 404], path
