"""Defines `graftwork keys`, which creates, lists, rotates and revokes the API keys of tenants."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.admin.tenants import TenantArgument
from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_json, show_table

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import TenantKey

app = typer.Typer(no_args_is_help=True, help="API keys of a tenant. Needs GRAFTWORK_ADMIN_KEY.")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `keys list` shows it.")]


@app.command()
def create(
    tenant: TenantArgument,
    name: Annotated[str, typer.Option(help="What to call the key.")],
    scope: Annotated[list[str] | None, typer.Option(help="Allow only this; may be given again (default: all).")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="Allow only this model; may be given again (default: all).")
    ] = None,
    allow_ip: Annotated[
        list[str] | None, typer.Option(help="Allow only this network (CIDR); may be given again (default: all).")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(help="When it ends, ISO 8601 or unix seconds (default: never).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key. Its secret is shown only this once.

    Example: graftwork keys create acme --name laptop --scope read --allow-ip 192.0.2.0/24 --expires-at 2030-01-01
    """
    with connect() as client:
        key = client.admin.keys.create(
            tenant_id_of(client, tenant),
            name=name,
            scopes=tuple(scope) if scope else None,
            adapters=tuple(adapter) if adapter else None,
            allowed_ips=tuple(allow_ip) if allow_ip else None,
            expires_at=expires_at,
        )
    _show_secret(key, as_json)


@app.command(name="list")
def list_keys(tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """List a tenant's keys, without their secrets.

    Example: graftwork keys list acme
    """
    with connect() as client:
        keys = client.admin.keys.list(tenant_id_of(client, tenant))
    if as_json:
        return show_json(keys.raw)
    rows = [
        (
            key.id,
            key.name,
            ", ".join(key.scopes) or "none",
            "all" if key.adapters is None else ", ".join(key.adapters) or "none",
            "all" if key.allowed_ips is None else ", ".join(key.allowed_ips),
            moment(key.last_used_at),
            moment(key.expires_at),
            moment(key.revoked_at),
        )
        for key in keys
    ]
    columns = ("id", "name", "scopes", "models", "addresses", "last used", "expires", "revoked")
    return show_table(columns, rows, f"No keys yet: graftwork keys create {tenant} --name NAME")


@app.command()
def rotate(
    tenant: TenantArgument,
    key: KeyArgument,
    overlap: Annotated[
        str, typer.Option(help="How long the old key stays valid: 90s, 30m, 24h or 7d.", metavar="TIME")
    ] = "0s",
    expires_at: Annotated[
        str | None, typer.Option(help="When the new key ends, ISO 8601 or unix seconds (default: as the old one).")
    ] = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a new key that allows the same as an old one, which ends. The secret is shown only this once.

    Example: graftwork keys rotate acme key_01h… --overlap 24h --yes
    """
    overlap_s = _seconds(overlap)
    ends = f"in {overlap}" if overlap_s else "at once, with the requests that it has started"
    confirm(f"Make a new key for {key}, which ends {ends}?", yes)
    with connect() as client:
        new = client.admin.keys.rotate(tenant_id_of(client, tenant), key, overlap_s=overlap_s, expires_at=expires_at)
    _show_secret(new, as_json)


@app.command()
def revoke(tenant: TenantArgument, key: KeyArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Revoke a key. The key never works again.

    Example: graftwork keys revoke acme key_01h… --yes
    """
    confirm(f"Revoke {key} for good?", yes)
    with connect() as client:
        revoked = client.admin.keys.revoke(tenant_id_of(client, tenant), key)
    return show_json(revoked.raw) if as_json else typer.echo(f"Revoked {key}.")


def _show_secret(key: "TenantKey", as_json: bool) -> None:
    if as_json:
        return show_json(key.raw)
    typer.echo(f"{key.name} ({key.id}); this secret is shown this once:", err=True)
    return typer.echo(key.key or "")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time: write 90s, 30m, 24h or 7d.", param_hint="--overlap")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]
