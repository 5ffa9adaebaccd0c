"""Tests of a tenant's adapters, their aliases, and their names as models."""

from typing import Any

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

    deleted = await tenant.client.delete("/v1/adapters/pirate")

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
