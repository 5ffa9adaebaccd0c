"""Tests of uploads in parts and of fetches over HTTP."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import Gateway, TestTenant

CONFIG, WEIGHTS = config_bytes(), weights_bytes(tensors(0))
DIGEST = f"sha256:{hashlib.sha256(CONFIG + WEIGHTS).hexdigest()}"
NEW = {"name": "pirate", "config": CONFIG.decode(), "size_bytes": len(WEIGHTS), "digest": DIGEST}
PATH = "/v1/adapter_uploads"


async def create(tenant: TestTenant, **changes: Any) -> str:
    answer = await tenant.client.post(PATH, json=NEW | changes)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def send(tenant: TestTenant, upload: str, offset: int, content: Any, **headers: str) -> httpx.Response:
    given = {"upload-offset": str(offset), "content-type": "application/octet-stream"} | headers
    return await tenant.client.patch(f"{PATH}/{upload}", content=content, headers=given)


async def test_an_upload_in_parts(tenant: TestTenant) -> None:
    """Parts that are sent one after another become a version; each answer says how many bytes there are."""
    upload = await create(tenant)
    first = await send(tenant, upload, 0, WEIGHTS[:1000])
    shown = await tenant.client.get(f"{PATH}/{upload}")
    second = await send(tenant, upload, 1000, WEIGHTS[1000:])
    done = await tenant.client.post(f"{PATH}/{upload}/complete")

    assert [answer.json()["received_bytes"] for answer in (first, shown, second)] == [1000, 1000, len(WEIGHTS)]
    assert (done.status_code, done.json()["status"], done.json()["version"]) == (200, "ready", 1)
    adapter = (await tenant.client.get("/v1/adapters/pirate")).json()
    assert adapter["versions"][0]["size_bytes"] == len(WEIGHTS)
    assert [one["id"] for one in (await tenant.client.get(PATH, params={"name": "pirate"})).json()["data"]] == [upload]
    assert (await tenant.client.get(PATH, params={"name": "other"})).json()["data"] == []


async def leave_after(gateway: Gateway, tenant: TestTenant, upload: str, content: bytes) -> None:
    """Sends the beginning of a part, and then closes the connection, as a server tells an application of it."""
    messages = iter([{"type": "http.request", "body": content, "more_body": True}, {"type": "http.disconnect"}])
    headers = {
        "authorization": f"Bearer {tenant.key}",
        "upload-offset": "0",
        "content-type": "application/octet-stream",
    }
    scope = {
        "type": "http",
        "method": "PATCH",
        "path": f"{PATH}/{upload}",
        "raw_path": f"{PATH}/{upload}".encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("gateway.test", 80),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> Any:
        return next(messages)

    async def ignore(message: Any) -> None: ...

    await gateway.app(scope, receive, ignore)


async def test_a_client_that_leaves_goes_on_at_the_offset(gateway: Gateway, tenant: TestTenant) -> None:
    """A connection that breaks in a part loses nothing that has arrived, and a wrong offset names the right one."""
    upload = await create(tenant)
    await leave_after(gateway, tenant, upload, WEIGHTS[:300])
    wrong = await send(tenant, upload, 0, WEIGHTS)
    error = wrong.json()["error"]
    rest = await send(tenant, upload, error["offset"], WEIGHTS[error["offset"] :])

    assert (wrong.status_code, error["code"], error["offset"]) == (409, "wrong_offset", 300)
    assert rest.json()["received_bytes"] == len(WEIGHTS)


async def test_what_is_too_large_is_cut_off(gateway: Gateway, tenant: TestTenant) -> None:
    """An announced length above the limit, a part above it, and a part above the announced length are a 413."""
    limit = gateway.resources.server.settings.max_upload_bytes
    upload = await create(tenant)

    announced = await tenant.client.post(PATH, json=NEW | {"size_bytes": limit + 1})
    declared = await send(tenant, upload, 0, b"x", **{"content-length": str(limit + 1)})
    beyond = await send(tenant, upload, 0, WEIGHTS + b"x")

    assert [answer.status_code for answer in (announced, declared, beyond)] == [413, 413, 413]


async def test_a_part_that_trickles_is_given_up(gateway: Gateway, tenant: TestTenant) -> None:
    """A part that has not arrived in time is a 408, and what has arrived of it stays."""
    upload = await create(tenant)

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(100):
            gateway.clock.advance(gateway.resources.server.settings.upload_timeout_s / 10)
            yield b"x"

    answer = await send(tenant, upload, 0, trickle())

    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    assert 0 < (await tenant.client.get(f"{PATH}/{upload}")).json()["received_bytes"] < 100


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"source": "hf:acme/lora@main"}, None),
        ({"size_bytes": None}, None),
        ({"digest": None}, "digest"),
        ({"digest": "md5:1"}, "digest"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"name": "Not A Name"}, "name"),
        ({"size_bytes": None, "config": None, "source": "hf:acme/lora"}, "source"),
        ({"size_bytes": None, "config": None, "digest": None, "source": "https://files.test/a"}, "digest"),
        ({"size_bytes": None, "source": "hf:acme/lora@main"}, "config"),
    ],
)
async def test_wrong_bodies(tenant: TestTenant, changes: dict[str, Any], param: str | None) -> None:
    """A body that names neither bytes nor a source, or both, or lacks a digest, is a 422 that says so."""
    answer = await tenant.client.post(PATH, json=NEW | changes)

    assert answer.status_code == 422, answer.text
    assert param is None or answer.json()["error"]["param"] == param


async def test_parts_are_bytes(tenant: TestTenant) -> None:
    """A part in JSON or a form, or compressed, is refused, and so is a missing offset."""
    upload = await create(tenant)
    for headers in ({"content-type": "application/json"}, {"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        assert (await send(tenant, upload, 0, b"{}", **headers)).status_code == 422
    missing = await tenant.client.patch(f"{PATH}/{upload}", content=b"x")

    assert (missing.status_code, missing.json()["error"]["param"]) == (422, "upload-offset")


async def test_a_key_for_some_adapters(gateway: Gateway, tenant: TestTenant) -> None:
    """A key that may name other adapters only neither creates nor sees nor cancels this one's upload."""
    upload = await create(tenant)
    _, key = await gateway.resources.account.tenancy.create_key(tenant.id, "few", adapters=["other"])
    async with gateway.client(key) as client:
        refused = [
            await client.post(PATH, json=NEW),
            await client.get(f"{PATH}/{upload}"),
            await client.post(f"{PATH}/{upload}/complete"),
            await client.delete(f"{PATH}/{upload}"),
        ]
        assert [answer.status_code for answer in refused] == [403] * 4
        assert (await client.get(PATH)).json()["data"] == []
        assert (await client.post(PATH, json=NEW | {"name": "other"})).status_code == 201


async def test_a_fetch_that_is_not_allowed(tenant: TestTenant) -> None:
    """A bucket that the operator has not named is a 403, which names what is allowed."""
    answer = await tenant.client.post(PATH, json={"name": "pirate", "source": "s3://models/support"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (403, "source_not_allowed", "source")
    assert "hf:, https:" in error["message"]


async def test_a_signature_in_a_url_stays_secret(gateway: Gateway, tenant: TestTenant) -> None:
    """The query of a URL is in no answer and in no audit row."""
    body = {"name": "pirate", "source": "https://files.test/a.gguf?sig=very-secret", "digest": DIGEST}
    made = await tenant.client.post(PATH, json=body)
    audit = await gateway.admin.get("/v1/admin/audit")

    assert (made.status_code, made.json()["source"]) == (201, "https://files.test/a.gguf")
    assert "files.test/a.gguf" in audit.text
    assert "very-secret" not in made.text + audit.text + (await tenant.client.get(PATH)).text
