"""Defines `graftwork organisations`, which manages groups of tenants that share limits."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.admin.tenants import TenantArgument
from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_facts, show_json, show_table

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import Organisation, Tenant

app = typer.Typer(no_args_is_help=True, help="Organisations: tenants that share limits. Needs GRAFTWORK_ADMIN_KEY.")

OrganisationArgument = Annotated[str, typer.Argument(metavar="ORGANISATION", help="The organisation's id.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What to call the organisation.")], as_json: JsonFlag = False
) -> None:
    """Make an organisation.

    Example: graftwork organisations create acme-group
    """
    with connect() as client:
        organisation = client.admin.organisations.create(name)
    _show(organisation, as_json)
    if not as_json:
        typer.echo(f"Next: graftwork organisations add {organisation.id} TENANT")


@app.command(name="list")
def list_organisations(as_json: JsonFlag = False) -> None:
    """List the organisations.

    Example: graftwork organisations list
    """
    with connect() as client:
        found = client.admin.organisations.list(limit=100)
    if as_json:
        return show_json(found.raw)
    rows = [(each.id, each.name, moment(each.created_at)) for each in found]
    return show_table(("id", "name", "created"), rows, "No organisations yet: graftwork organisations create NAME")


@app.command()
def show(organisation: OrganisationArgument, as_json: JsonFlag = False) -> None:
    """Show one organisation.

    Example: graftwork organisations show org_01hzx
    """
    with connect() as client:
        _show(client.admin.organisations.get(organisation), as_json)


@app.command()
def rename(
    organisation: OrganisationArgument,
    name: Annotated[str, typer.Argument(help="The new name.")],
    as_json: JsonFlag = False,
) -> None:
    """Rename an organisation.

    Example: graftwork organisations rename org_01hzx acme-holding
    """
    with connect() as client:
        _show(client.admin.organisations.rename(organisation, name), as_json)


@app.command()
def tenants(organisation: OrganisationArgument, as_json: JsonFlag = False) -> None:
    """List the tenants of an organisation.

    Example: graftwork organisations tenants org_01hzx
    """
    with connect() as client:
        found = client.admin.organisations.tenants(organisation, limit=100)
    if as_json:
        return show_json(found.raw)
    rows = [(each.id, each.name, each.status) for each in found]
    return show_table(
        ("id", "name", "status"), rows, f"No tenants yet: graftwork organisations add {organisation} TENANT"
    )


@app.command()
def add(organisation: OrganisationArgument, tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """Make a tenant belong to an organisation, and to no other one.

    Example: graftwork organisations add org_01hzx acme
    """
    with connect() as client:
        moved = client.admin.organisations.add_tenant(organisation, tenant_id_of(client, tenant))
    _show_moved(moved, as_json)


@app.command()
def remove(organisation: OrganisationArgument, tenant: TenantArgument, as_json: JsonFlag = False) -> None:
    """Make a tenant of an organisation belong to none.

    Example: graftwork organisations remove org_01hzx acme
    """
    with connect() as client:
        moved = client.admin.organisations.remove_tenant(organisation, tenant_id_of(client, tenant))
    _show_moved(moved, as_json)


@app.command()
def delete(organisation: OrganisationArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Delete an organisation without tenants, with its limits.

    Example: graftwork organisations delete org_01hzx --yes
    """
    confirm(f"Delete {organisation} with its limits?", yes)
    with connect() as client:
        deleted = client.admin.organisations.delete(organisation)
    return show_json(deleted.raw) if as_json else typer.echo(f"Deleted {organisation}.")


def _show(organisation: "Organisation", as_json: bool) -> None:
    if as_json:
        return show_json(organisation.raw)
    return show_facts(
        [("id", organisation.id), ("name", organisation.name), ("created", moment(organisation.created_at))]
    )


def _show_moved(tenant: "Tenant", as_json: bool) -> None:
    if as_json:
        return show_json(tenant.raw)
    return typer.echo(f"{tenant.name} belongs to {tenant.organisation_id or 'no organisation'}.")
