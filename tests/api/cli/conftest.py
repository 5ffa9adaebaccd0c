"""The command line run in this process, without a server's address or key in the environment."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from graftwork.api.cli.main import build_app
from graftwork.platform.clock import SystemClock
from tests.api.cli.live_gateway import LiveGateway, listening_gateway
from tests.api.in_process_gateway import ADMIN_KEY, write_model_folder
from tests.identity_provider import CLI, CONSOLE, IdentityProvider, listening_provider

Graftwork = Callable[..., Result]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[LiveGateway]:
    """A gateway that listens, over a scripted engine: one for all tests of a file."""
    model = write_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    with listening_gateway(tmp_path_factory.mktemp("data"), model, sqlite_template) as gateway:
        yield gateway


@pytest.fixture
def graftwork(monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """Run one command: `graftwork("tenants", "list", input="y")`."""
    for name in ("URL", "API_KEY", "ADMIN_KEY", "DATA_DIR", "DATABASE_URL", "DEMO", "MODEL", "HOST", "PORT"):
        monkeypatch.delenv(f"GRAFTWORK_{name}", raising=False)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv(
        "XDG_CONFIG_HOME", "/nonexistent"
    )  # the user's own graftwork.toml is none of the tests' business
    app = build_app()

    def run(*arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=input)

    return run


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of no server, and keys in the environment."""
    url = "http://127.0.0.1:9"
    for name, value in (("URL", url), ("API_KEY", "gw_key"), ("ADMIN_KEY", "gwa_key")):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return url


@dataclass(frozen=True)
class Place:
    """A gateway that listens, with its provider."""

    live: LiveGateway
    provider: IdentityProvider


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[Place]:
    model = write_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    with listening_provider(SystemClock().now) as provider:
        provider.interval_s = 0.001
        settings = {"oidc_issuer": provider.issuer, "oidc_client_id": CONSOLE, "oidc_cli_client_id": CLI}
        with listening_gateway(tmp_path_factory.mktemp("data"), model, sqlite_template, **settings) as live:
            yield Place(live, provider)


@pytest.fixture
def own(place: Place, graftwork: Graftwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """The command line of somebody without a key, with an own folder of settings."""
    monkeypatch.setenv("GRAFTWORK_URL", place.live.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return graftwork


@pytest.fixture
def operate(own: Graftwork, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """The same with the admin key."""

    def run(*arguments: str, input: str | None = None) -> object:
        with monkeypatch.context() as patched:
            patched.setenv("GRAFTWORK_ADMIN_KEY", ADMIN_KEY)
            result = own(*arguments, input=input)
        assert result.exit_code == 0, result.output
        return result

    return run  # type: ignore[return-value]
