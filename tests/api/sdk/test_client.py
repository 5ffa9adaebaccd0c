"""Tests of the clients: their arguments, requests and imports."""

import ast
import inspect
import pydoc
import subprocess
import sys
from typing import get_args

import httpx
import pytest

import graftwork
from graftwork.api.sdk.chat import Completions
from graftwork.api.sdk.client import AsyncGraftwork, Graftwork
from graftwork.api.sdk.session import Session
from graftwork.api.sdk.sessions import Sessions
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, SyncRuntime
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.chat import ChatCompletion
from graftwork.platform.answers.models import Model
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


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    """`localhost:8000`, as people write it, works; another scheme is told what to write."""
    assert Graftwork("localhost:8000", "k").base_url == "http://localhost:8000"
    assert Graftwork("gateway.internal/v1", "k").base_url == "http://gateway.internal"
    for wrong in ("ftp://host:8", "http://", "http://host:port"):
        with pytest.raises(ConfigurationError, match="http://HOST:PORT"):
            Graftwork(wrong, "k")


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


def test_help_shows_the_types_that_calls_return() -> None:
    """The signature of a method, as `help` and notebooks read it, names the result of each client's call."""
    with Graftwork("http://nowhere", "k") as client:
        sync = inspect.signature(client.sessions.create)
        page = inspect.signature(client.models.list)
    aio = AsyncGraftwork("http://nowhere", "k").sessions.create

    assert sync.return_annotation == Session[SyncRuntime]
    assert page.return_annotation == Page[Model]
    assert "self" not in sync.parameters
    assert inspect.signature(aio).return_annotation == Session[AsyncRuntime]
    assert inspect.iscoroutinefunction(aio)


def test_help_of_a_group_lists_its_methods() -> None:
    """`help(Sessions)` shows each method with its parameters and its result; a chat's answer is one of four types."""
    shown = pydoc.plain(pydoc.render_doc(Sessions))

    assert "create(self, *, model: str, **parameters:" in shown
    assert "-> graftwork.api.sdk.session.Session[~R]" in shown
    assert "Steps" not in shown
    assert ChatCompletion in get_args(inspect.signature(Completions.create).return_annotation)


def test_dir_shows_the_clients_before_they_are_loaded() -> None:
    """A fresh interpreter lists both clients, so that completion finds them, without loading the SDK."""
    program = "import sys, graftwork; print(dir(graftwork)); print('httpx' in sys.modules)"

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    listed, loaded = output.splitlines()
    assert {"Graftwork", "AsyncGraftwork", "__version__"} <= set(ast.literal_eval(listed))
    assert loaded == "False"
