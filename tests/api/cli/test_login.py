"""Tests of a person's own sign-in at the command line, and of the operator's commands for people."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork import AsyncGraftwork, Graftwork
from graftwork.api.sdk.login.login import Logins
from graftwork.api.sdk.login.login_file import LoginFile
from tests.api.cli.conftest import Graftwork as Command
from tests.api.cli.conftest import Place
from tests.api.cli.live_gateway import LiveGateway
from tests.api.in_process_gateway import ADMIN_KEY


def test_from_a_sign_in_to_a_sign_out(place: Place, own: Command, operate: Command, tmp_path: Path) -> None:
    """A person is added and gets roles, signs in, acts as both, and is nobody after signing out."""
    operate("people", "add", "ada", "--email", "ada@example.com")
    operate("people", "grant", "ada@example.com", "tenant-member:acme")
    operate("people", "grant", "ada", "operator")
    place.provider.subject, place.provider.device_answers = "ada", ["authorization_pending"]

    login = own("login")
    who = own("whoami")
    asked = own("ask", "tiny", "Who are you?")
    listed = own("people", "list", "--json")
    token_file = tmp_path / "graftwork" / "logins.json"
    mode = stat.S_IMODE(token_file.stat().st_mode)
    out = own("logout")
    after = own("models")

    assert login.exit_code == 0, login.output
    assert "WDJB-MJHT" in login.output
    assert "Signed in as ada@example.com; you act an operator and in ten_" in login.output
    assert "ada@example.com" in who.output
    assert "inference, read, usage" in who.output
    assert asked.exit_code == 0, asked.output
    assert "tenant-member:ten_" in json.loads(listed.output)["data"][0]["roles"][1]
    assert mode == 0o600
    assert "Signed out" in out.output
    assert (after.exit_code, "graftwork login" in after.output) == (1, True)
    for printed in (login, who, listed, out):
        assert "gwc_" not in printed.output
        assert "eyJ" not in printed.output


def test_a_sign_out_ends_the_sign_in_at_the_provider(place: Place, own: Command, operate: Command) -> None:
    """After `logout` the refresh token is worth nothing, also for who has copied it before."""
    operate("people", "add", "dee")
    operate("people", "grant", "dee", "tenant-viewer:acme")
    place.provider.subject = "dee"
    assert own("login").exit_code == 0
    copied = LoginFile().find(place.live.url)
    assert copied is not None
    assert copied.refresh_token in place.provider.refreshes

    out, again = own("logout"), own("logout")

    assert copied.refresh_token not in place.provider.refreshes
    assert (out.output, out.exit_code) == (f"Signed out of {place.live.url}.\n", 0)
    assert again.output == f"You were not signed in at {place.live.url}.\n"
    LoginFile().keep(replace(copied, expires_at=0.0))
    assert "run `graftwork login` again" in own("models").output


@pytest.mark.parametrize(("person", "fault"), [("fay", "is away"), ("gil", "has no such endpoint")])
def test_a_sign_out_without_the_provider(place: Place, own: Command, operate: Command, person: str, fault: str) -> None:
    """Where the provider cannot be told, the sign-in is forgotten all the same, and the person learns what stays."""
    operate("people", "add", person)
    operate("people", "grant", person, "tenant-viewer:acme")
    place.provider.subject = person
    assert own("login").exit_code == 0
    place.provider.is_away = fault == "is away"
    place.provider.document = {"revocation_endpoint": None} if fault == "has no such endpoint" else {}

    out = own("logout")

    place.provider.is_away, place.provider.document = False, {}
    assert out.exit_code == 0
    assert f"Signed out of {place.live.url}." in out.output
    assert "The identity provider could not be told" in out.output
    assert LoginFile().find(place.live.url) is None


def test_a_suspension_reaches_the_command_line(place: Place, own: Command, operate: Command) -> None:
    """A person who is suspended is refused at the next command, cannot sign in, and can after `resume`."""
    operate("people", "add", "bob")
    operate("people", "grant", "bob", "tenant-viewer:acme")
    place.provider.subject = "bob"
    assert own("login").exit_code == 0
    assert own("models").exit_code == 0

    operate("people", "suspend", "bob", "--yes")
    refused, again = own("models"), own("login")
    operate("people", "resume", "bob")
    resumed = own("login")

    assert (refused.exit_code, again.exit_code, resumed.exit_code) == (1, 1, 0)
    assert "Your sign-in has ended" in refused.output
    assert "You are suspended" in again.output


def test_a_stranger_is_told_what_to_ask_for(place: Place, own: Command) -> None:
    """Somebody without a role is signed in nowhere, and learns the id to tell the operator."""
    place.provider.subject = "eve"

    result = own("login")

    assert result.exit_code == 1
    assert "has no role here; ask the operator for one" in result.output
    assert "per_" in result.output


async def test_the_sdk_acts_as_the_person_and_renews(
    place: Place, own: Command, operate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clients without a key use the sign-in, and take a new token with the refresh token when theirs has ended."""
    operate("people", "add", "cy")
    operate("people", "grant", "cy", "tenant-member:acme")
    place.provider.subject = "cy"
    assert own("login").exit_code == 0
    file = LoginFile()
    first = file.find(place.live.url)
    assert first is not None
    file.keep(replace(first, expires_at=0.0))

    async with AsyncGraftwork() as client:
        shown = await client.auth.whoami()
    second = file.find(place.live.url)
    with Graftwork(api_key=place.live.key) as with_key:
        by_key = with_key.auth.whoami()

    assert second is not None
    assert (shown.kind, second.tenant_id) == ("person", first.tenant_id)
    assert second.tenant_token != first.tenant_token
    assert second.refresh_token != first.refresh_token
    assert by_key.kind == "key"
    place.provider.refreshes.clear()
    file.keep(replace(second, expires_at=0.0))
    ended = own("models")
    assert (ended.exit_code, "run `graftwork login` again" in ended.output) == (1, True)


def test_a_server_without_a_provider(live: LiveGateway, own: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that offers no sign-in says so, and stores nothing."""
    result = own("login", "--url", live.url)

    assert result.exit_code == 1
    assert "offers no sign-in" in result.output
    assert Logins().token(live.url, admin=False) is None


def test_two_people_of_one_address(own: Command, operate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An e-mail address that two people have names neither."""
    for subject in ("twin-1", "twin-2"):
        operate("people", "add", subject, "--email", "twins@example.com")
    monkeypatch.setenv("GRAFTWORK_ADMIN_KEY", ADMIN_KEY)

    result = own("people", "grant", "twins@example.com", "operator")

    assert result.exit_code == 1
    assert "2 people are known as 'twins@example.com'; give an id: per_" in result.output
