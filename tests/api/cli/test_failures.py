"""Tests of failed commands: one line says what to do, and the exit status says who is at fault."""

import pytest

from graftwork.api.cli.console.failures import advice
from graftwork.api.sdk.transport import errors
from tests.api.cli.conftest import Graftwork


def test_no_server_is_one_line(graftwork: Graftwork, unreachable: str) -> None:
    """Without a server, one line names the address, how to start a server and how to choose another."""
    result = graftwork("adapters", "list")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"Error: No Graftwork server answers at {unreachable}: start one with `graftwork serve --demo`, "
        "or set GRAFTWORK_URL.\n"
    )


@pytest.mark.parametrize(
    ("command", "variable"), [("tenants", "GRAFTWORK_ADMIN_KEY"), ("sessions", "GRAFTWORK_API_KEY")]
)
def test_a_missing_key_is_named(command: str, variable: str, graftwork: Graftwork) -> None:
    """A command without its key names the variable of that key."""
    result = graftwork(command, "list")

    assert result.exit_code == 1
    assert variable in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["tenants", "create"],
        ["keys", "create", "acme"],
        ["adapters", "promote", "support", "newest"],
        ["quotas", "set", "acme"],
        ["quotas", "set", "acme", "--requests-per-minute", "lots"],
        ["audit", "--limit", "0"],
    ],
)
def test_wrong_usage_is_status_two(arguments: list[str], graftwork: Graftwork, unreachable: str) -> None:
    """Wrong usage sends nothing and ends with status 2."""
    result = graftwork(*arguments)

    assert result.exit_code == 2
    assert "No Graftwork server" not in result.output


def test_a_folder_without_its_files_is_named(graftwork: Graftwork, unreachable: str, tmp_path: object) -> None:
    """Pushing a folder that is not an adapter names the missing file."""
    result = graftwork("adapters", "push", str(tmp_path))

    assert result.exit_code == 1
    assert "adapter_config.json" in result.stderr


def test_bad_settings_name_their_flag(graftwork: Graftwork) -> None:
    """A malformed size is refused with its flag before anything starts."""
    result = graftwork("serve", "--demo", "--device-bytes", "much")

    assert result.exit_code == 1
    assert "device_bytes" in result.stderr


def test_advice_is_one_line_with_the_field() -> None:
    """The advice names the wrong field once, in one line."""
    named = errors.ValidationError("rank is\ntoo large", param="config.r")
    repeated = errors.ValidationError("config.r: too large", param="config.r")

    assert advice(named) == "config.r: rank is too large"
    assert advice(repeated) == "config.r: too large"


def test_server_errors_say_where_to_look() -> None:
    """The message of a server error has the request's id."""
    assert "req_7" in advice(errors.ServerError("Oh.", status_code=500, request_id="req_7"))
