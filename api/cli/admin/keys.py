"""Defines `graftwork keys`, which creates, lists, rotates and revokes API keys.

Without a tenant's name these are the keys of the tenant in which a tenant-admin has signed in; with one, an operator's.
"""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect, connect_in_own_tenant, tenant_id_of
from graftwork.api.cli.console.flags import sent_moment
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, note_more, show_json, show_table

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork
    from graftwork.api.sdk.keys import KeyRules
    from graftwork.platform.answers.admin import TenantKey

app = typer.Typer(
    no_args_is_help=True,
    help="API keys: of your own tenant, if you have signed in as its tenant-admin; of any, with GRAFTWORK_ADMIN_KEY.",
)

_WHOSE = "The tenant's id or name, for an operator (default: your own tenant)."
KeyTenant = Annotated[str | None, typer.Argument(metavar="TENANT", help=_WHOSE, show_default=False)]
LeadingTenant = Annotated[list[str] | None, typer.Argument(metavar="TENANT", help=_WHOSE, show_default=False)]
"""A `KeyTenant` before another argument: the parser lets only a list be empty there."""
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `keys list` shows it.")]


@app.command()
def create(
    tenant: KeyTenant = None,
    *,
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

    Example: graftwork keys create --name laptop --scope read --allow-ip 192.0.2.0/24 --expires-at 2030-01-01

    Example: graftwork keys create acme --name laptop
    """
    rules: KeyRules = {
        "scopes": tuple(scope) if scope else None,
        "adapters": tuple(adapter) if adapter else None,
        "allowed_ips": tuple(allow_ip) if allow_ip else None,
        "expires_at": sent_moment(expires_at),
    }
    with _connect(tenant) as client:
        if tenant is None:
            key = client.keys.create(name=name, **rules)
        else:
            key = client.admin.keys.create(tenant_id_of(client, tenant), name=name, **rules)
    _show_secret(key, as_json)


@app.command(name="list")
def list_keys(tenant: KeyTenant = None, as_json: JsonFlag = False) -> None:
    """List the keys without their secrets, the newest first: 100 at most.

    Example: graftwork keys list
    """
    with _connect(tenant) as client:
        if tenant is None:
            keys = client.keys.list(limit=100)
        else:
            keys = client.admin.keys.list(tenant_id_of(client, tenant), limit=100)
    note_more(keys)
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
    return show_table(columns, rows, "No keys yet: see graftwork keys create --help")


@app.command()
def rotate(
    tenants: LeadingTenant = None,
    *,
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

    Example: graftwork keys rotate key_01h… --overlap 24h --yes
    """
    tenant = _one(tenants)
    overlap_s, ends_at = _seconds(overlap), sent_moment(expires_at)
    ends = f"in {overlap}" if overlap_s else "at once, with the requests that it has started"
    confirm(f"Make a new key for {key}, which ends {ends}?", yes)
    with _connect(tenant) as client:
        if tenant is None:
            new = client.keys.rotate(key, overlap_s=overlap_s, expires_at=ends_at)
        else:
            owner = tenant_id_of(client, tenant)
            new = client.admin.keys.rotate(owner, key, overlap_s=overlap_s, expires_at=ends_at)
    _show_secret(new, as_json)


@app.command()
def revoke(tenants: LeadingTenant = None, *, key: KeyArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Revoke a key. The key never works again.

    Example: graftwork keys revoke key_01h… --yes
    """
    tenant = _one(tenants)
    confirm(f"Revoke {key} for good?", yes)
    with _connect(tenant) as client:
        if tenant is None:
            revoked = client.keys.revoke(key)
        else:
            revoked = client.admin.keys.revoke(tenant_id_of(client, tenant), key)
    return show_json(revoked.raw) if as_json else typer.echo(f"Revoked {key}.")


def _one(tenants: list[str] | None) -> str | None:
    """Returns the tenant that was named before a key, or None. Raises BadParameter for several."""
    if tenants and len(tenants) > 1:
        raise typer.BadParameter(f"one tenant and one key, not {len(tenants) + 1} names.", param_hint="[TENANT] KEY")
    return tenants[0] if tenants else None


def _connect(tenant: str | None) -> "Graftwork":
    if tenant is not None:
        return connect()
    return connect_in_own_tenant("An operator names the tenant, as in `graftwork keys list acme`.")


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
