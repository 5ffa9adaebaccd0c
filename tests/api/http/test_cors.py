"""Tests of answers to web pages of other origins."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.in_process_gateway import Gateway, TestTenant, chat, gateway_settings, open_gateway, write_model_folder

PAGE = "https://chat.example.com"


@asynccontextmanager
async def gateway_for(folder: Path, *origins: str) -> AsyncGenerator[Gateway]:
    settings = gateway_settings(folder / "data", write_model_folder(folder / "model"))
    async with open_gateway(replace(settings, cors_origin=origins)) as gateway:
        yield gateway


async def preflight(gateway: Gateway, origin: str, method: str = "POST") -> httpx.Response:
    """What a browser asks before a page's request with a key and JSON."""
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    return await gateway.anonymous.options("/v1/chat/completions", headers=headers)


async def test_a_page_of_a_named_origin_may_call(tmp_path: Path) -> None:
    """A preflight needs no key and allows the page's headers; the answer, whole or streamed, shows its own headers."""
    async with gateway_for(tmp_path, PAGE, "http://localhost:3000") as gateway:
        tenant = await gateway.tenant()
        asked = await preflight(gateway, PAGE)
        answers = [
            await tenant.client.post("/v1/chat/completions", json=chat(stream=stream), headers={"origin": PAGE})
            for stream in (False, True)
        ]

    allowed = asked.headers["access-control-allow-headers"].lower()
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        exposed = set(answer.headers["access-control-expose-headers"].split(", "))
        own = {name for name in answer.headers if name.startswith(("x-", "retry", "idempotent"))}
        assert own - {"x-accel-buffering"} <= exposed


async def test_errors_can_be_read_by_the_page(tmp_path: Path) -> None:
    """An answer with an error status shows the page its origin too, so that the page can read the error."""
    async with gateway_for(tmp_path, PAGE) as gateway:
        answer = await gateway.anonymous.post("/v1/chat/completions", json=chat(), headers={"origin": PAGE})

    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


async def test_a_page_of_another_origin_may_not(tmp_path: Path) -> None:
    """A preflight of an origin that is not named is refused, and an answer does not show the page its origin."""
    async with gateway_for(tmp_path, PAGE) as gateway:
        asked = await preflight(gateway, "https://evil.example")
        answer = await gateway.anonymous.get("/healthz", headers={"origin": "https://evil.example"})

    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
    assert "access-control-allow-origin" not in answer.headers


async def test_every_origin(tmp_path: Path) -> None:
    """`*` allows the pages of every origin, without credentials."""
    async with gateway_for(tmp_path, "*") as gateway:
        asked = await preflight(gateway, "https://anybody.example", "DELETE")

    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in asked.headers


async def test_off_by_default(gateway: Gateway, tenant: TestTenant) -> None:
    """Without the setting, no answer has a header of CORS, and a preflight is an ordinary 405."""
    asked = await preflight(gateway, PAGE)
    answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"origin": PAGE})

    headers: list[Any] = [*asked.headers, *answer.headers]
    assert asked.status_code == 405
    assert not [name for name in headers if name.startswith("access-control")]


async def test_a_crash_can_be_read_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that nobody expected is a 500 that shows the page its origin and the request's id."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with gateway_for(tmp_path, PAGE) as gateway:
        tenant = await gateway.tenant()
        monkeypatch.setattr(gateway.resources.inference.registry, "resolve", fail)
        answer = await tenant.client.post("/v1/chat/completions", json=chat(), headers={"origin": PAGE})

    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


async def test_the_page_may_read_what_is_documented(tmp_path: Path) -> None:
    """A page may read exactly the headers that the OpenAPI document gives to some answer."""
    async with gateway_for(tmp_path, PAGE) as gateway:
        answer = await gateway.anonymous.get("/openapi.json", headers={"origin": PAGE})

    document = answer.json()
    answers = [
        *document["components"]["responses"].values(),
        *(
            each
            for path in document["paths"].values()
            for method in path.values()
            for each in method["responses"].values()
        ),
    ]
    documented = {name for each in answers for name in each.get("headers", ())}
    assert set(answer.headers["access-control-expose-headers"].split(", ")) == documented
