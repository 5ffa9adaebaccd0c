"""Tests of the clients: their arguments, requests and imports."""

import subprocess
import sys

import httpx
import pytest

import graftwork
from graftwork.api.sdk.client import AsyncGraftwork, Graftwork
from tests.api.sdk.scripted_server import ScriptedServer

EMPTY = {"object": "list", "data": [], "has_more": False}


def test_the_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address and keys come from the arguments, or from GRAFTWORK_* variables."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=EMPTY)

    monkeypatch.setenv("GRAFTWORK_URL", "http://from-env:1")
    monkeypatch.setenv("GRAFTWORK_API_KEY", "gw_env")
    monkeypatch.setenv("GRAFTWORK_ADMIN_KEY", "gwa_env")

    with Graftwork(api_key="gw_given", transport=httpx.MockTransport(answer)) as client:
        client.models.list()
        client.admin.tenants.list()

    assert [str(request.url) for request in seen] == [
        "http://from-env:1/v1/models",
        "http://from-env:1/v1/admin/tenants",
    ]
    assert [request.headers["authorization"] for request in seen] == ["Bearer gw_given", "Bearer gwa_env"]


@pytest.mark.parametrize("url", ["http://host:8", "http://host:8/", "http://host:8/v1", "http://host:8/v1/"])
def test_the_address_forgives_v1(url: str) -> None:
    """A base_url with /v1, as OpenAI's SDK needs it, works too."""
    assert Graftwork(url, "k").base_url == "http://host:8"


def test_none_is_not_sent_as_a_query() -> None:
    """Query parameters that are None are left out."""
    server = ScriptedServer(httpx.Response(200, json=EMPTY))

    server.client().usage.list(start=5, group_by="day")

    assert server.lines == ["GET /v1/usage?from=5&group_by=day"]


def test_pages_are_iterable() -> None:
    """A page iterates over its entries, and has the cursor of the next page."""
    body = {"data": [{"id": "a"}, {"id": "b"}], "has_more": True, "last_id": "b"}
    server = ScriptedServer(httpx.Response(200, json=body))

    page = server.client().models.list()

    assert [model.id for model in page] == ["a", "b"]
    assert (len(page), page.has_more, page.last_id) == (2, True, "b")


def test_the_package_hands_out_the_clients() -> None:
    """`from graftwork import Graftwork, AsyncGraftwork` gives the two clients."""
    assert graftwork.Graftwork is Graftwork
    assert graftwork.AsyncGraftwork is AsyncGraftwork


def test_the_sdk_loads_only_httpx_and_pydantic() -> None:
    """Importing the SDK loads httpx, pydantic, the standard library and its own files."""
    program = (
        "import sys, annotated_types, httpx, pydantic.main; before = set(sys.modules);"
        "from graftwork import AsyncGraftwork, Graftwork;"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(roots - sys.stdlib_module_names - {'pydantic'}))"
    )

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert output.strip() == "['graftwork']"
