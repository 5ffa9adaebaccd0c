"""Tests of the settings that `serve`, `gateway` and `engine` get from their flags."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graftwork.platform.settings.settings import Settings
from tests.api.cli.conftest import Graftwork

Started = list[tuple[Any, ...]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What the processes were started with, in place of the processes."""
    calls: Started = []

    def recorder() -> Callable[..., None]:
        return lambda *arguments: calls.append(arguments)

    entries = {"serve": "serve", "gateway": "run_gateway", "engine_process": "run_engine"}
    for module_name, function in entries.items():
        module = ModuleType(f"graftwork.api.server.{module_name}")
        setattr(module, function, recorder())
        monkeypatch.setitem(sys.modules, f"graftwork.api.server.{module_name}", module)
    return calls


def test_serve_reads_flags_then_variables(
    graftwork: Graftwork, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag has priority over its variable, and the variable over the default."""
    monkeypatch.setenv("GRAFTWORK_PORT", "9000")
    monkeypatch.setenv("GRAFTWORK_HOST", "0.0.0.0")

    result = graftwork("serve", "--demo", "--host", "::1", "--device-kv-bytes", "512MiB", "--data-dir", "there")

    assert result.exit_code == 0, result.output
    ((settings,),) = started
    assert isinstance(settings, Settings)
    assert (settings.demo, settings.host, settings.port) == (True, "::1", 9000)
    assert (settings.device_bytes, settings.data_dir) == (512 * 2**20, Path("there"))


def test_origins_of_web_pages_may_be_repeated(
    graftwork: Graftwork, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--cors-origin` may be given several times; the variable has commas; without both there is none."""
    graftwork("serve", "--demo")
    graftwork("gateway", "--cors-origin", "https://a.example", "--cors-origin", "http://localhost:3000")
    monkeypatch.setenv("GRAFTWORK_CORS_ORIGIN", "https://b.example, https://c.example")
    graftwork("serve", "--demo")

    assert [settings.cors_origin for (settings,) in started] == [
        (),
        ("https://a.example", "http://localhost:3000"),
        ("https://b.example", "https://c.example"),
    ]


def test_a_switch_that_is_off_leaves_the_variable(
    graftwork: Graftwork, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRAFTWORK_DEMO holds when `--demo` is not given."""
    monkeypatch.setenv("GRAFTWORK_DEMO", "true")

    graftwork("serve")

    assert started[0][0].demo is True


def test_an_engine_listens_where_it_is_told(graftwork: Graftwork, started: Started) -> None:
    """An engine listens on `--listen`, or else on the socket in the data folder."""
    graftwork("engine", "--demo", "--listen", "0.0.0.0:9000")
    graftwork("engine", "--demo", "--data-dir", "/data")

    assert [listen for _, listen in started] == ["0.0.0.0:9000", "unix:/data/engine.sock"]


def test_a_gateway_is_told_its_engine(graftwork: Graftwork, started: Started) -> None:
    """A gateway reads its engine's address from the settings."""
    graftwork("gateway", "--engine-address", "10.0.0.5:9000", "--model", "/llama")

    assert started[0][0].engine_address == "10.0.0.5:9000"
    assert started[0][0].model == Path("/llama")


def test_a_flag_may_be_zero(graftwork: Graftwork, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero is a value like others, and has priority over its variable."""
    monkeypatch.setenv("GRAFTWORK_REPLICAS", "3")
    monkeypatch.setenv("GRAFTWORK_MAX_DRAFT_TOKENS", "5")

    graftwork("serve", "--demo", "--replicas", "0", "--max-replicas", "2", "--max-draft-tokens", "0")

    ((settings,),) = started
    assert (settings.replicas, settings.most_replicas, settings.max_draft_tokens) == (0, 2, 0)
