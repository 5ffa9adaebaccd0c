"""Tests of the methods that paths take."""

import re

import httpx

from graftwork.api.server.app import create_metrics_app
from tests.api.in_process_gateway import Gateway

METHODS = {"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"}


async def test_wrong_methods(gateway: Gateway) -> None:
    """Every method that the OpenAPI document lacks at a path is a 405 whose `allow` has exactly the document's."""
    for path, operations in gateway.app.openapi()["paths"].items():
        taken = {method.upper() for method in operations}
        for method in sorted(METHODS - taken):
            answer = await gateway.anonymous.request(method, re.sub(r"\{\w+\}", "some", path))

            assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, taken), (method, path)


async def test_methods_of_the_document_itself(gateway: Gateway) -> None:
    """The 405 of the OpenAPI document and of the port for metrics names methods too."""
    metrics = httpx.ASGITransport(app=create_metrics_app(gateway.resources))
    async with httpx.AsyncClient(transport=metrics, base_url="http://metrics.test") as client:
        answers = [await client.post(path) for path in ("/metrics", "/healthz")]

    document = await gateway.anonymous.post("/openapi.json")

    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [(405, "GET")] * 2
    assert (document.status_code, document.headers["allow"]) == (405, "GET, HEAD")
