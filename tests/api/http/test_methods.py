"""Tests of the methods that paths take."""

import re

import httpx

from graftwork.api.server.app import create_metrics_app
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant

METHODS = {"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"}


async def test_wrong_methods(gateway: Gateway) -> None:
    """Every method that the OpenAPI document lacks at a path is a 405 whose `allow` has exactly the document's, and HEAD
    where there is GET."""
    for path, operations in gateway.app.openapi()["paths"].items():
        taken = {method.upper() for method in operations}
        taken |= {"HEAD"} if "GET" in taken else set()
        for method in sorted(METHODS - taken):
            answer = await gateway.anonymous.request(method, re.sub(r"\{\w+\}", "some", path))

            assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, taken), (method, path)


async def test_methods_of_the_document_itself(gateway: Gateway) -> None:
    """The 405 of the OpenAPI document and of the port for metrics names methods too."""
    metrics = httpx.ASGITransport(app=create_metrics_app(gateway.resources))
    async with httpx.AsyncClient(transport=metrics, base_url="http://metrics.test") as client:
        answers = [await client.post(path) for path in ("/metrics", "/healthz")]

    document = await gateway.anonymous.post("/openapi.json")

    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [(405, "GET, HEAD")] * 2
    assert (document.status_code, document.headers["allow"]) == (405, "GET, HEAD")


async def test_head(gateway: Gateway, tenant: TestTenant) -> None:
    """Every path that takes GET answers HEAD with the status and headers of GET, and without a body. No other does."""
    paths = [path for path, operations in gateway.app.openapi()["paths"].items() if "get" in operations]
    for path in [*(re.sub(r"\{\w+\}", "some", path) for path in paths), "/openapi.json", "/nowhere"]:
        plain = {"accept-encoding": "identity"}
        got, head = await tenant.client.get(path, headers=plain), await tenant.client.head(path, headers=plain)

        assert head.content == b"", path
        assert (head.status_code, head.headers.keys()) == (got.status_code, got.headers.keys()), path
        assert head.headers.get("content-type") == got.headers.get("content-type"), path
        if got.status_code == 200 and path != "/metrics":
            assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content)), path

    assert (await tenant.client.head("/v1/chat/completions")).status_code == 405
    assert (await gateway.anonymous.head("/v1/models")).status_code == 401


async def test_head_of_a_stream(gateway: Gateway, tenant: TestTenant) -> None:
    """HEAD of a stream that would last answers at once, on a connection that takes the next request, and reads nothing."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    headers = {"authorization": tenant.client.headers["authorization"]}
    async with gateway_on_port(gateway) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        head = await client.head(f"/v1/sessions/{session}/events")
        after = await client.get("/v1/models")

    assert (head.status_code, head.headers["content-type"], head.content) == (
        200,
        "text/event-stream; charset=utf-8",
        b"",
    )
    assert after.status_code == 200
    assert len(after.json()["data"]) == 1
