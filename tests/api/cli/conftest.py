"""The command line run in this process, without a server's address or key in the environment."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from graftwork.api.cli.main import build_app

Graftwork = Callable[..., Result]


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
