"""Tests of the page at `/`."""

import re

from tests.api.in_process_gateway import Gateway


async def test_a_browser_is_told_where_to_go(gateway: Gateway) -> None:
    """A browser gets a page whose every link leads to a route of this server, with a policy that allows no script."""
    answer = await gateway.anonymous.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    links = re.findall(r'href="([^"]+)"', answer.text)

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert {"/docs", "/healthz", "/openapi.json"} <= {*links}
    for link in links:
        assert (await gateway.anonymous.get(link)).status_code != 404, link


async def test_a_program_is_told_in_json(gateway: Gateway) -> None:
    """A program gets the same paths as JSON."""
    body = (await gateway.anonymous.get("/")).json()

    assert body["name"] == "graftwork"
    assert body["docs"] == "/docs"
    assert body["health"] == "/healthz"
