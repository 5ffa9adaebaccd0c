"""Tests of what a key and an end user may have begun: open sessions and adapters, and how limits show their use."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.ids import KeyId
from graftwork.platform.quotas.quota import Quota
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.adapters.uploads.two_uploaders import digest
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat, gateway_settings, open_gateway
from tests.api.routes.test_costs import set_prices
from tests.api.routes.test_limits import organisation_of, put, refusal

SIZE = len(weights_bytes(tensors()))


async def key_of(gateway: Gateway, tenant: TestTenant, name: str = "second") -> tuple[KeyId, httpx.AsyncClient]:
    """A new key of a tenant, and a client that has it."""
    key, text = await gateway.resources.account.tenancy.create_key(tenant.id, name)
    return key.id, gateway.client(text)


async def begin(client: httpx.AsyncClient, user: str | None = None) -> httpx.Response:
    return await client.post("/v1/sessions", json={"model": "tiny"} | ({"user": user} if user else {}))


async def push(client: httpx.AsyncClient, name: str, seed: int = 0, user: str | None = None) -> httpx.Response:
    form = {"name": name} | ({"user": user} if user else {})
    return await client.post("/v1/adapters", data=form, files=adapter_upload(seed))


async def used(gateway: Gateway, path: str) -> Any:
    answer = await gateway.admin.get(f"/v1/admin/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()["used"]


async def test_a_key_has_its_own_limit_of_sessions(gateway: Gateway, tenant: TestTenant) -> None:
    """Sessions and forks that a key begins count for it until they are closed; those of other keys do not."""
    key_id, mine = await key_of(gateway, tenant)
    await put(gateway, f"tenants/{tenant.id}/keys/{key_id}/quota", max_sessions=2)
    first, second = [(await begin(mine)).json()["id"] for _ in range(2)]
    others = [(await begin(tenant.client)).json()["id"] for _ in range(3)]

    refused = [await begin(mine), await mine.post(f"/v1/sessions/{others[0]}/fork", json={})]
    of_other = await tenant.client.post(f"/v1/sessions/{first}/fork", json={"count": 2})
    kept = await mine.post("/v1/responses", json={"model": "tiny", "input": "x"})
    await tenant.client.delete(f"/v1/sessions/{first}")
    again = await begin(mine)
    full = await begin(mine)
    await mine.delete(f"/v1/sessions/{second}")
    fork = await mine.post(f"/v1/sessions/{others[0]}/fork", json={})

    for answer in (*refused, full):
        assert refusal(answer) == (429, "key", "max_sessions")
    assert [answer.status_code for answer in (of_other, kept, again, fork)] == [201, 200, 201, 201]
    assert (await used(gateway, f"tenants/{tenant.id}/keys/{key_id}/quota"))["sessions"] == 2


async def test_an_end_user_has_its_own_limit_of_sessions(gateway: Gateway, tenant: TestTenant) -> None:
    """An end user's sessions count over all keys, with their forks; each end user without own limits has the common one."""
    _, other = await key_of(gateway, tenant)
    await put(gateway, f"tenants/{tenant.id}/user_quota", max_sessions=1)
    await put(gateway, f"tenants/{tenant.id}/user_quota?user=alice", max_sessions=2)
    first = (await begin(tenant.client, "alice")).json()["id"]
    await begin(other, "alice")
    await begin(tenant.client, "bob")

    refused = [await begin(tenant.client, name) for name in ("alice", "bob")]
    refused.append(await other.post(f"/v1/sessions/{first}/fork", json={}))
    free = [await begin(tenant.client, "carol"), *[await begin(tenant.client) for _ in range(3)]]
    await tenant.client.delete(f"/v1/sessions/{first}")
    again = await begin(other, "alice")

    for answer in refused:
        assert refusal(answer) == (429, "user", "max_sessions")
    assert {answer.status_code for answer in (*free, again)} == {201}
    assert (await used(gateway, f"tenants/{tenant.id}/user_quota?user=alice"))["sessions"] == 2
    assert await used(gateway, f"tenants/{tenant.id}/user_quota") is None


async def test_a_key_has_its_own_limit_of_adapters(gateway: Gateway, tenant: TestTenant) -> None:
    """A name counts for the key that has pushed it first, in all its versions, until it is erased."""
    key_id, mine = await key_of(gateway, tenant)
    path = f"tenants/{tenant.id}/keys/{key_id}/quota"
    await put(gateway, path, max_adapters=2)
    made = [await push(tenant.client, "theirs"), await push(mine, "one", 1), await push(mine, "two", 2)]

    refused = await push(mine, "three", 3)
    versions = [await push(mine, "theirs", 4), await push(tenant.client, "one", 5), await push(mine, "one", 6)]
    at_limit = await used(gateway, path)
    await tenant.client.delete("/v1/adapters/one?erase=true")
    taken_over = await push(tenant.client, "one", 1)
    again, full = await push(mine, "three", 3), await push(mine, "four", 7)
    before = await used(gateway, path)
    erased = await tenant.client.delete("/v1/adapters/two/versions/1?erase=true")
    emptied = await push(tenant.client, "two", 2)

    assert [answer.status_code for answer in (*made, *versions, taken_over, again, emptied)] == [201] * 9
    for answer in (refused, full):
        assert refusal(answer) == (429, "key", "max_adapters")
        assert answer.json()["error"]["code"] == "max_adapters_exceeded"
    assert (at_limit["adapters"], at_limit["adapter_bytes"]) == (2, 4 * SIZE)
    assert (before["adapters"], erased.status_code, (await used(gateway, path))["adapters"]) == (2, 200, 1)


async def test_an_end_user_has_its_own_limit_of_adapters(gateway: Gateway, tenant: TestTenant) -> None:
    """A push for an end user, at once or in parts, counts in its limit, and a push for nobody in none."""
    await put(gateway, f"tenants/{tenant.id}/user_quota?user=alice", max_adapters=1)
    first = await push(tenant.client, "one", 1, "alice")

    refused = await push(tenant.client, "two", 2, "alice")
    weights, config = weights_bytes(tensors(3)), config_bytes()
    upload = {"name": "three", "config": config.decode(), "size_bytes": len(weights), "digest": digest(config, weights)}
    begun = (await tenant.client.post("/v1/adapter_uploads", json={**upload, "user": "alice"})).json()["id"]
    content = {"upload-offset": "0", "content-type": "application/octet-stream"}
    await tenant.client.patch(f"/v1/adapter_uploads/{begun}", content=weights, headers=content)
    in_parts = await tenant.client.post(f"/v1/adapter_uploads/{begun}/complete")
    others = [await push(tenant.client, "four", 4, "bob"), await push(tenant.client, "five", 5)]

    assert {answer.status_code for answer in (first, *others)} == {201}
    for answer in (refused, in_parts):
        assert refusal(answer) == (429, "user", "max_adapters")
    assert (await used(gateway, f"tenants/{tenant.id}/user_quota?user=alice"))["adapters"] == 1


@pytest.mark.parametrize("level", ["key", "user"])
async def test_simultaneous_requests_leave_exactly_what_may_be(
    level: str, tmp_path: Path, tiny_model: Path, database_url: str, inspector: AdapterInspector
) -> None:
    """Of many sessions and adapters that two gateways begin at once for one key or user, exactly as many as may are made."""
    settings = [gateway_settings(tmp_path / name, tiny_model, database_url) for name in ("a", "b")]
    async with open_gateway(settings[0], inspector) as gateway, open_gateway(settings[1], inspector) as second:
        tenant = await gateway.tenant()
        key_id = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]["id"]
        path = f"tenants/{tenant.id}/" + (f"keys/{key_id}/quota" if level == "key" else "user_quota?user=alice")
        await put(gateway, path, max_sessions=3, max_adapters=2)
        clients = [one.client(tenant.key) for one in (gateway, second)] * 5

        sessions = await asyncio.gather(*(begin(client, "alice") for client in clients))
        adapters = await asyncio.gather(
            *(push(client, f"a{index}", index, "alice") for index, client in enumerate(clients[:6]))
        )

        assert Counter(answer.status_code for answer in sessions) == {201: 3, 429: 7}
        assert Counter(answer.status_code for answer in adapters) == {201: 2, 429: 4}
        left = await used(second, path)
        assert (left["sessions"], left["adapters"]) == (3, 2)


async def test_use_is_what_a_count_by_hand_says(gateway: Gateway, tenant: TestTenant) -> None:
    """After any sequence of begun, forked and closed sessions, each level's use is that of a plain list of them."""
    random = Random(7)
    keys = [await key_of(gateway, tenant, name) for name in ("a", "b")]
    alive: dict[str, tuple[str, str | None]] = {}
    for _ in range(40):
        key_id, client = random.choice(keys)
        one = random.choice(list(alive)) if alive else None
        match random.choice(["begin", "begin", "fork", "close"]):
            case "fork" if one is not None:
                for fork in (await client.post(f"/v1/sessions/{one}/fork", json={"count": 2})).json()["data"]:
                    alive[fork["id"]] = (key_id, alive[one][1])
            case "close" if one is not None:
                assert (await client.delete(f"/v1/sessions/{one}")).status_code == 200
                del alive[one]
            case _:
                user = random.choice([None, "alice", "bob"])
                alive[(await begin(client, user)).json()["id"]] = (key_id, user)

    by_key, by_user = Counter(one[0] for one in alive.values()), Counter(one[1] for one in alive.values())
    for key_id, _ in keys:
        assert (await used(gateway, f"tenants/{tenant.id}/keys/{key_id}/quota"))["sessions"] == by_key[key_id] > 0
    for user in ("alice", "bob"):
        found = await used(gateway, f"tenants/{tenant.id}/user_quota?user={user}")
        assert found["sessions"] == by_user[user] > 0
    assert (await used(gateway, f"tenants/{tenant.id}/quota"))["sessions"] == len(alive)


async def test_each_level_shows_its_use(gateway: Gateway, tenant: TestTenant) -> None:
    """Limits come with sessions, adapters, bytes, and the month's tokens and costs; no level sees what others use."""
    other, stranger = await gateway.tenant("Other"), await gateway.tenant("Stranger")
    organisation = await organisation_of(gateway, tenant, other)
    await set_prices(gateway)
    key_id = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]["id"]
    for one in (tenant, other, stranger):
        await begin(one.client, "alice")
        await push(one.client, "bot", user="alice")
        await one.client.post("/v1/chat/completions", json=chat(user="alice"))
    (mine,) = await tenant.usage()

    own = (await tenant.client.get("/v1/quota")).json()["used"]
    paths = (f"tenants/{tenant.id}/quota", f"tenants/{tenant.id}/keys/{key_id}/quota")
    found = [await used(gateway, path) for path in (*paths, f"tenants/{tenant.id}/user_quota?user=alice")]
    shared = await used(gateway, f"organisations/{organisation}/quota")

    assert own == {
        "sessions": 1,
        "adapters": 1,
        "adapter_bytes": SIZE,
        "monthly_tokens": mine["total_tokens"],
        "monthly_costs": mine["costs"],
    }
    assert found == [own] * 3
    assert own["monthly_costs"]
    assert (shared["sessions"], shared["adapters"], shared["adapter_bytes"]) == (2, 2, 2 * SIZE)
    assert shared["monthly_tokens"] == 2 * own["monthly_tokens"] > 0


async def test_limits_can_be_sent_back_as_they_were_read(gateway: Gateway, tenant: TestTenant) -> None:
    """A client may change what it has read, with its use, and send it; the use changes nothing."""
    path = f"tenants/{tenant.id}/quota"
    await put(gateway, path, max_sessions=5)
    read = (await gateway.admin.get(f"/v1/admin/{path}")).json()

    await put(gateway, path, **read | {"max_adapters": 3, "used": {"sessions": 99}})

    found = (await gateway.admin.get(f"/v1/admin/{path}")).json()
    assert (found["max_sessions"], found["max_adapters"], found["used"]["sessions"]) == (5, 3, 0)


async def test_a_rotated_key_s_successor_counts_with_it(gateway: Gateway, tenant: TestTenant) -> None:
    """Sessions and adapters that a key has begun count for its successor too, and what that one begins for the key."""
    key_id, mine = await key_of(gateway, tenant)
    base = f"tenants/{tenant.id}/keys"
    await put(gateway, f"{base}/{key_id}/quota", max_sessions=2, max_adapters=1)
    first = (await begin(mine)).json()["id"]

    rotated = (await gateway.admin.post(f"/v1/admin/{base}/{key_id}/rotate", json={"overlap_s": 60})).json()
    successor = gateway.client(rotated["key"])
    made = [await begin(successor), await push(successor, "one", 1)]
    refused = [await begin(successor), await begin(mine), await push(mine, "two", 2)]
    refused.append(await successor.post(f"/v1/sessions/{first}/fork", json={}))

    assert [answer.status_code for answer in made] == [201, 201]
    assert [refusal(answer)[1:] for answer in refused] == [
        ("key", "max_sessions"),
        ("key", "max_sessions"),
        ("key", "max_adapters"),
        ("key", "max_sessions"),
    ]
    for one in (key_id, rotated["id"]):
        found = await used(gateway, f"{base}/{one}/quota")
        assert (found["sessions"], found["adapters"]) == (2, 1)


async def test_the_narrowest_level_is_named(gateway: Gateway) -> None:
    """Of several limits that a session would exceed, the answer names the tenant's before the key's and the user's."""
    tenant = await gateway.tenant(quota=Quota(max_sessions=2))
    key_id = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]["id"]
    await put(gateway, f"tenants/{tenant.id}/user_quota?user=alice", max_sessions=1)
    await begin(tenant.client, "alice")

    of_user = await begin(tenant.client, "alice")
    await put(gateway, f"tenants/{tenant.id}/keys/{key_id}/quota", max_sessions=1)
    of_key = await begin(tenant.client, "alice")
    await put(gateway, f"tenants/{tenant.id}/quota", max_sessions=1)
    of_tenant = await begin(tenant.client, "alice")

    assert [refusal(answer)[1] for answer in (of_user, of_key, of_tenant)] == ["user", "key", "tenant"]


@pytest.mark.parametrize("limit", ["max_adapter_bytes", "max_adapter_rank", "max_file_bytes", "max_host_kv_bytes"])
async def test_what_counts_by_tenant_is_no_limit_of_a_key(gateway: Gateway, tenant: TestTenant, limit: str) -> None:
    """A limit that a key or an end user cannot have is a 422 that says where to set it."""
    key_id = (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/keys")).json()["data"][0]["id"]
    for path in (f"keys/{key_id}/quota", "user_quota", "user_quota?user=alice"):
        answer = await gateway.admin.put(f"/v1/admin/tenants/{tenant.id}/{path}", json={limit: 1})

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, limit)
        assert "set it for a tenant" in answer.json()["error"]["message"]
