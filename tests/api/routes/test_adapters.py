"""Tests of a tenant's adapters, their aliases, and their names as models."""

from typing import Any

import pytest

from graftwork.platform.quotas.quota import Quota
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat


async def test_push(tenant: TestTenant) -> None:
    """An upload answers the adapter with its first version."""
    body = await tenant.push_adapter()

    assert (body["object"], body["name"], body["aliases"]) == ("adapter", "pirate", {})
    version = body["versions"][0]
    assert (version["version"], version["rank"], version["status"]) == (1, 4, "ready")
    assert version["digest"].startswith("sha256:")
    assert set(version["target_modules"]) == {"q_proj", "v_proj", "down_proj"}


async def test_versions(tenant: TestTenant) -> None:
    """Other files make a new version, and the same files answer the same version."""
    await tenant.push_adapter()

    second = await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))
    again = await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))

    assert [version["version"] for version in second.json()["versions"]] == [1, 2]
    assert again.json() == second.json()


async def test_version_of_unknown_adapter(tenant: TestTenant) -> None:
    """A version cannot be uploaded without an adapter of that name."""
    answer = await tenant.client.post("/v1/adapters/nobody/versions", files=adapter_upload())

    assert answer.status_code == 404


async def test_list_and_get(tenant: TestTenant) -> None:
    """Adapters are listed page by page, and read one by one."""
    names = ["a", "b", "c"]
    made = {name: await tenant.push_adapter(name, seed) for seed, name in enumerate(names)}

    first = (await tenant.client.get("/v1/adapters?limit=2&order=asc")).json()
    rest = (await tenant.client.get(f"/v1/adapters?limit=2&order=asc&after={first['last_id']}")).json()

    assert [adapter["name"] for adapter in first["data"] + rest["data"]] == names
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert first["first_id"] == made["a"]["id"]
    assert (await tenant.client.get("/v1/adapters/b")).json() == made["b"]


async def test_bad_weights(tenant: TestTenant) -> None:
    """Weights that do not fit are a 422 with the exact tensor."""
    found = tensors()
    name = next(iter(found))
    found[name] = found[name][:, :-1].copy()
    files = {"config": config_bytes(), "weights": weights_bytes(found)}

    answer = await tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=files)

    assert answer.status_code == 422
    assert answer.json()["error"]["param"].endswith(name)


async def test_bad_forms(tenant: TestTenant) -> None:
    """A missing part or an invalid name is a 422 that names it."""
    files = adapter_upload()
    bad: list[tuple[str, dict[str, Any]]] = [
        ("name", {"files": files}),
        ("weights", {"data": {"name": "a"}, "files": {"config": files["config"]}}),
        ("config", {"data": {"name": "a"}, "files": {"weights": files["weights"]}}),
        ("name", {"data": {"name": "No Such Name"}, "files": files}),
        ("name", {"data": {"name": "tiny"}, "files": files}),
        ("name", {"json": {"name": "a"}}),
    ]
    for param, request in bad:
        answer = await tenant.client.post("/v1/adapters", **request)

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text


async def test_rank_and_count_limits(gateway: Gateway) -> None:
    """A rank above the limit is a 422, and a count above it a 429 that must not be retried."""
    flat = await gateway.tenant(quota=Quota(max_adapter_rank=2))
    few = await gateway.tenant(quota=Quota(max_adapters=0))

    rank = await flat.client.post("/v1/adapters", data={"name": "a"}, files=adapter_upload())
    count = await few.client.post("/v1/adapters", data={"name": "a"}, files=adapter_upload())

    assert rank.status_code == 422
    assert (count.status_code, count.headers["x-should-retry"]) == (429, "false")


async def test_alias(gateway: Gateway, tenant: TestTenant) -> None:
    """An alias makes a model name stand for a version, and its answer tells the previous one."""
    await tenant.push_adapter()
    both = (await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))).json()["versions"]

    first = await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})
    await tenant.client.post("/v1/chat/completions", json=chat() | {"model": "pirate"})
    second = await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"weights": {"1": 0.25, "2": 0.75}})
    removed = await tenant.client.delete("/v1/adapters/pirate/aliases/prod")

    assert first.json() == {"adapter": "pirate", "alias": "prod", "target": {"version": 1}, "previous": None}
    assert gateway.engine.requests[0].adapter_digests == (both[0]["digest"],)
    assert second.json()["target"] == {"weights": {"1": 0.25, "2": 0.75}}
    assert second.json()["previous"] == {"version": 1}
    assert removed.json()["target"] is None


async def test_bad_aliases(tenant: TestTenant) -> None:
    """An alias with an invalid target is a 422, and with an unknown version a 404."""
    await tenant.push_adapter()
    path = "/v1/adapters/pirate/aliases/prod"
    bad: list[tuple[str, dict[str, Any], int]] = [
        (path, {}, 422),
        (path, {"version": 1, "weights": {"1": 1.0}}, 422),
        (path, {"version": 0}, 422),
        (path, {"version": "1"}, 422),
        (path, {"weights": {"one": 1.0}}, 422),
        (path, {"weights": {"1": 0}}, 422),
        (path, {"weights": {}}, 422),
        (path, {"version": 1, "colour": "red"}, 422),
        (path, {"version": 9}, 404),
        ("/v1/adapters/nobody/aliases/prod", {"version": 1}, 404),
        ("/v1/adapters/pirate/aliases/3", {"version": 1}, 422),
    ]
    for route, body, status in bad:
        answer = await tenant.client.put(route, json=body)

        assert answer.status_code == status, (route, body, answer.text)


async def test_models(tenant: TestTenant) -> None:
    """The base model comes first, then adapters and their aliases; each can be asked for alone."""
    await tenant.push_adapter()
    await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})

    listed = (await tenant.client.get("/v1/models")).json()

    assert [model["id"] for model in listed["data"]] == ["tiny", "pirate", "pirate@prod"]
    for model in ["tiny", "pirate", "pirate@1", "pirate@prod"]:
        found = await tenant.client.get(f"/v1/models/{model}")
        assert (found.status_code, found.json()["id"], found.json()["object"]) == (200, model, "model")
    missing = await tenant.client.get("/v1/models/pirate@2")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_delete(gateway: Gateway, tenant: TestTenant) -> None:
    """A deleted adapter is gone from every route, and the engine forgets it."""
    digest = (await tenant.push_adapter())["versions"][0]["digest"]

    deleted = await tenant.client.delete("/v1/adapters/pirate?erase=true")

    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    assert gateway.engine.forgotten == [digest]
    assert (await tenant.client.get("/v1/adapters/pirate")).status_code == 404
    assert (await tenant.client.post("/v1/chat/completions", json=chat() | {"model": "pirate"})).status_code == 404


async def test_delete_version(tenant: TestTenant) -> None:
    """A version with an alias cannot be deleted; another can, and its number is not used again."""
    await tenant.push_adapter()
    await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))
    await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})

    held = await tenant.client.delete("/v1/adapters/pirate/versions/1")
    gone = await tenant.client.delete("/v1/adapters/pirate/versions/2")
    third = await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(2))

    assert (held.status_code, gone.status_code) == (409, 200)
    assert [version["version"] for version in third.json()["versions"]] == [1, 3]
    assert (await tenant.client.delete("/v1/adapters/pirate/versions/7")).status_code == 404
    assert (await tenant.client.delete("/v1/adapters/pirate/versions/x")).status_code == 422


async def test_restore(gateway: Gateway, tenant: TestTenant) -> None:
    """A deleted adapter and a deleted version come back, and are a 404 where there is nothing to restore."""
    await tenant.push_adapter()
    second = (await tenant.client.post("/v1/adapters/pirate/versions", files=adapter_upload(1))).json()

    await tenant.client.delete("/v1/adapters/pirate/versions/2")
    without = (await tenant.client.get("/v1/adapters/pirate")).json()
    refused = await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 2})
    restored = await tenant.client.post("/v1/adapters/pirate/versions/2/restore")
    await tenant.client.delete("/v1/adapters/pirate")
    taken = await tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload(2))
    whole = await tenant.client.post("/v1/adapters/pirate/restore")

    assert [(version["version"], version["status"]) for version in without["deleted_versions"]] == [(2, "deleted")]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_ready")
    assert restored.json() == whole.json() == second
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "adapter_deleted")
    assert gateway.engine.forgotten == []
    for path in ("pirate", "pirate/versions/2", "nobody"):
        assert (await tenant.client.post(f"/v1/adapters/{path}/restore")).status_code == 404


async def test_rollback_and_history(gateway: Gateway, tenant: TestTenant) -> None:
    """A rollback returns to the recorded target, a second one without a past is a 409, and the history tells by whom."""
    for seed in range(3):
        await tenant.client.post("/v1/adapters", data={"name": "pirate"}, files=adapter_upload(seed))
    for version in (1, 3):
        await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": version})

    back = await tenant.client.post("/v1/adapters/pirate/aliases/prod/rollback")
    again = await tenant.client.post("/v1/adapters/pirate/aliases/prod/rollback")
    history = (await tenant.client.get("/v1/adapters/pirate/aliases/prod/history?order=asc")).json()
    audit = (await gateway.admin.get("/v1/admin/audit?limit=1")).json()["data"][0]

    assert (back.json()["target"], back.json()["previous"]) == ({"version": 1}, {"version": 3})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "no_earlier_target")
    assert [(event["id"], event["reason"], event["target"]) for event in history["data"]] == [
        ("1", "set", {"version": 1}),
        ("2", "set", {"version": 3}),
        ("3", "rollback", {"version": 1}),
    ]
    assert (audit["action"], audit["target"]) == ("adapter.alias.rollback", "pirate@prod")
    assert {audit["actor"]} == {event["actor"] for event in history["data"]}
    assert audit["actor"].startswith("key_")


@pytest.mark.parametrize("after", ["x", "-1", "1.0", "1" * 10, "9" * 200])
async def test_a_history_after_no_number(tenant: TestTenant, after: str) -> None:
    """A history after what is no number of a change, or one that no database column holds, is a 422 that says why."""
    await tenant.push_adapter("pirate")
    await tenant.client.put("/v1/adapters/pirate/aliases/prod", json={"version": 1})

    answer = await tenant.client.get(f"/v1/adapters/pirate/aliases/prod/history?after={after}")

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "after")
    assert "1 to 9 digits" in answer.json()["error"]["message"]


async def test_a_push_without_promotion(tenant: TestTenant) -> None:
    """A version that is pushed with promote=false answers under its number, and not under the plain name."""
    await tenant.push_adapter()
    pushed = await tenant.client.post(
        "/v1/adapters", data={"name": "pirate", "promote": "false"}, files=adapter_upload(1)
    )
    models = ("pirate", "pirate@2")
    answers = [await tenant.client.post("/v1/chat/completions", json=chat(model=model)) for model in models]

    assert [version["held"] for version in pushed.json()["versions"]] == [False, True]
    assert [answer.headers["x-graftwork-model"] for answer in answers] == ["pirate@1", "pirate@2"]


async def test_usage_names_the_version(tenant: TestTenant) -> None:
    """Usage by adapter names the version that was served, and has work on the base model under its name."""
    await tenant.push_adapter()
    for model in ("tiny", "pirate"):
        await tenant.client.post("/v1/chat/completions", json=chat() | {"model": model})

    rows = await tenant.usage("adapter")

    assert [row["group"] for row in rows] == ["pirate@1", "tiny"]


async def test_empty_files_are_refused_by_name(tenant: TestTenant) -> None:
    """An upload of two empty files is a 422 that names the config, like any other bad file."""
    files = {"config": ("adapter_config.json", b""), "weights": ("adapter_model.safetensors", b"")}

    answer = await tenant.client.post("/v1/adapters", data={"name": "empty"}, files=files)

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "config")
