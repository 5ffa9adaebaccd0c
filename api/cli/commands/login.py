"""Defines `graftwork login`, `logout` and `whoami`: a person's own sign-in at a server, instead of a key."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, terminal_text
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.api.sdk.login.device_flow import DeviceCode
    from graftwork.api.sdk.login.login import SignInOffer
    from graftwork.platform.answers.people import WhoAmI

ServerUrl = Annotated[str | None, typer.Option("--url", metavar="URL", help="The server (default: GRAFTWORK_URL).")]


def login(
    url: ServerUrl = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The id or name of the tenant to act in (default: your only one).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign in as yourself: shows a code to enter in any browser. Then commands need no key.

    Example: graftwork login --url https://graftwork.example.com --tenant acme
    """
    from graftwork.api.sdk.client import base_url_of
    from graftwork.api.sdk.login.login import Logins

    tokens = Logins().sign_in(base_url_of(url), tenant, _tell)
    if as_json:  # without the tokens: they are in the file alone
        return show_json({name: tokens.raw[name] for name in ("object", "person", "tenant_id", "tenants")})
    acts = [*(["an operator"] if tokens.operator else []), *([f"in {tokens.tenant_id}"] if tokens.tenant else [])]
    typer.echo(
        f"Signed in as {tokens.person.email or tokens.person.subject}; you act {' and '.join(acts) or 'nowhere'}."
    )
    if tokens.tenant is None and tokens.tenants:
        names = ", ".join(terminal_text(seat.name) for seat in tokens.tenants)
        typer.echo(f"To act in a tenant: graftwork login --tenant NAME; yours are {names}.")
    return None


def logout(url: ServerUrl = None) -> None:
    """Forget your sign-in at a server, and end it at the identity provider.

    Example: graftwork logout
    """
    from graftwork.api.sdk.client import base_url_of
    from graftwork.api.sdk.login.login import Logins, SignOut

    server = base_url_of(url)
    done = Logins().sign_out(server)
    typer.echo(f"You were not signed in at {server}." if done is SignOut.WAS_OUT else f"Signed out of {server}.")
    if done is SignOut.PROVIDER_NOT_TOLD:
        typer.echo(
            "The identity provider could not be told: end your sign-in there, too, if this machine is lost.", err=True
        )


def whoami(as_json: JsonFlag = False) -> None:
    """Show as whom and as what your commands act.

    Example: graftwork whoami
    """
    with connect() as client:
        try:
            found = client.auth.whoami()
        except ConfigurationError:  # no tenant's key or token: perhaps an operator's
            found = client.auth.whoami(admin=True)
    return show_json(found.raw) if as_json else _show(found)


def _tell(offer: "SignInOffer", code: "DeviceCode") -> None:
    """Tells the person, on standard error, what to do in a browser."""
    typer.echo(f"To sign in with {terminal_text(offer.name)}, open this address in any browser:", err=True)
    typer.echo(f"\n    {terminal_text(code.verification_uri)}\n", err=True)
    typer.echo(
        f"and enter the code {terminal_text(code.user_code)}. Enter no code that somebody else has sent you.", err=True
    )
    if code.verification_uri_complete is not None:
        typer.echo(f"The same with the code in it: {terminal_text(code.verification_uri_complete)}", err=True)


def _show(found: "WhoAmI") -> None:
    person = found.person
    role = None if found.operator_role is None else f"{found.operator_role}"
    show_facts(
        [
            (
                "who",
                f"the key {found.key_id or 'of the operator'}" if person is None else person.email or person.subject,
            ),
            ("person", None if person is None else person.id),
            ("acts as", "operator" if found.acts_as == "operator" else f"{found.tenant_name} ({found.tenant_id})"),
            ("scopes", ", ".join(found.scopes) or None),
            ("operator role", role),
            ("tenants", ", ".join(f"{seat.name} ({seat.role})" for seat in found.tenants) or None),
        ]
    )
