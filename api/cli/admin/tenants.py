"""Defines `graftwork tenants`, which creates, lists, shows, suspends, resumes and deletes tenants, exports what they
have, and shows erasures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect, tenant_id_of, tenant_ids_of
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_facts, show_json, show_table, size

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import Tenant

app = typer.Typer(no_args_is_help=True, help="Tenants: who may use this server. Needs GRAFTWORK_ADMIN_KEY.")

DaysOption = Annotated[
    int | None, typer.Option(min=0, metavar="DAYS", help="Days after which they are deleted; 0 keeps them for ever.")
]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id or name.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What to call the tenant.")],
    weight: Annotated[
        float | None, typer.Option(help="Its share of a busy server, against the others' (default: 1.0).")
    ] = None,
    service_tier_ceiling: Annotated[
        str | None, typer.Option(help="The best tier it may ask for: priority, default or flex (default: default).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a tenant.

    Example: graftwork tenants create acme --weight 2
    """
    with connect() as client:
        tenant = client.admin.tenants.create(name, weight=weight, service_tier_ceiling=service_tier_ceiling)
        is_alone = len(tenant_ids_of(client, tenant.name)) == 1
    _show(tenant, as_json)
    if not is_alone:
        typer.echo(f"Note: another tenant is called {tenant.name} too, so commands need an id.", err=True)
    if not as_json:
        typer.echo(f"Next: graftwork keys create {tenant.name if is_alone else tenant.id} --name first-key")


@app.command(name="list")
def list_tenants(as_json: JsonFlag = False) -> None:
    """List the tenants.

    Example: graftwork tenants list
    """
    with connect() as client:
        tenants = client.admin.tenants.list(limit=100)
    if as_json:
        return show_json(tenants.raw)
    rows = [(each.id, each.name, each.status, each.weight, each.service_tier_ceiling) for each in tenants]
    columns = ("id", "name", "status", "weight", "tier ceiling")
    return show_table(columns, rows, "No tenants yet: graftwork tenants create NAME")


@app.command()
def show(tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """Show one tenant.

    Example: graftwork tenants show acme
    """
    with connect() as client:
        _show(client.admin.tenants.get(tenant_id_of(client, tenant)), as_json)


@app.command()
def suspend(tenant: TenantArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Refuse all of a tenant's keys until the tenant is resumed.

    Example: graftwork tenants suspend acme
    """
    confirm(f"Refuse every request of {tenant}?", yes)
    with connect() as client:
        _show(client.admin.tenants.suspend(tenant_id_of(client, tenant)), as_json)


@app.command()
def resume(tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """Accept the keys of a suspended tenant again.

    Example: graftwork tenants resume acme
    """
    with connect() as client:
        _show(client.admin.tenants.resume(tenant_id_of(client, tenant)), as_json)


@app.command()
def delete(tenant: TenantArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Delete a tenant with its keys, adapters and sessions; `tenants erasure` says when all is erased.

    Example: graftwork tenants delete acme --yes
    """
    confirm(f"Delete {tenant} with its keys, adapters and sessions?", yes)
    with connect() as client:
        deleted = client.admin.tenants.delete(tenant_id_of(client, tenant))
    return (
        show_json(deleted.raw)
        if as_json
        else typer.echo(f"Deleted {tenant}. Its data is erased within minutes: graftwork tenants erasure {deleted.id}")
    )


@app.command()
def erasure(
    tenant: Annotated[str, typer.Argument(metavar="ID", help="The id of a deleted tenant.")], as_json: JsonFlag = False
) -> None:
    """Show whether all data of a deleted tenant is erased.

    Example: graftwork tenants erasure ten_01hzx
    """
    with connect() as client:
        state = client.admin.tenants.erasure(tenant)
    if as_json:
        return show_json(state.raw)
    done = "not yet" if state.erased_at is None else moment(state.erased_at)
    return show_facts([("id", state.tenant_id), ("status", state.status), ("erased", done)])


@app.command()
def export(
    tenant: TenantArgument,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="The new file for the archive (ZIP).", show_default=False),
    ],
    keep: Annotated[
        bool, typer.Option("--keep-archive", help="Keep the archive on the server too, until it expires.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Export everything that a tenant has: sessions with their tokens, adapters, files, usage, keys without secrets.

    Example: graftwork tenants export acme --out acme.zip
    """
    if out.exists():
        raise typer.BadParameter(f"{out} exists: give a new file, so that nothing is overwritten.", param_hint="--out")
    with connect() as client:
        tenant_id = tenant_id_of(client, tenant)
        exports = client.admin.exports
        made = exports.wait(tenant_id, exports.create(tenant_id).id)
        if made.error is None:
            exports.download(tenant_id, made.id, out)
        if not keep:
            exports.delete(tenant_id, made.id)
    if as_json:
        show_json(made.raw)
    elif made.error is None:
        typer.echo(f"{out} has {made.rows} rows and all files of {tenant} ({size(made.bytes)}), SHA-256 {made.sha256}.")
    if made.error is not None:
        typer.echo(f"The export has failed: {made.error.message}", err=True)
        raise typer.Exit(1)


@app.command()
def retention(
    tenant: TenantArgument,
    session_days: DaysOption = None,
    response_days: DaysOption = None,
    file_days: DaysOption = None,
    usage_days: DaysOption = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show for how many days a tenant's data is kept; with options, set some of them. 0 means for ever.

    Example: graftwork tenants retention acme --session-days 90 --response-days 30
    """
    given = {
        "session_days": session_days,
        "response_days": response_days,
        "file_days": file_days,
        "usage_days": usage_days,
    }
    changes = {name: days or None for name, days in given.items() if days is not None}
    with connect() as client:
        tenant_id = tenant_id_of(client, tenant)
        found = client.admin.retention.get(tenant_id)
        if changes:
            confirm(f"Delete what {tenant} has for longer than that, within minutes and for good?", yes)
            days: dict[str, int | None] = {name: getattr(found, name) for name in given}
            found = client.admin.retention.set(tenant_id, **(days | changes))
    if as_json:
        return show_json(found.raw)
    return show_facts([(name.replace("_", " "), getattr(found, name) or "for ever") for name in given])


def _show(tenant: "Tenant", as_json: bool) -> None:
    if as_json:
        return show_json(tenant.raw)
    return show_facts(
        [
            ("id", tenant.id),
            ("name", tenant.name),
            ("status", tenant.status),
            ("weight", tenant.weight),
            ("tier ceiling", tenant.service_tier_ceiling),
            ("created", moment(tenant.created_at)),
        ]
    )
