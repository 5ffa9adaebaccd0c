"""Defines `graftwork webhooks`, which says where the alerts of budgets are sent."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.admin.quotas import OwnerArgument
from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_facts, show_json

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork
    from graftwork.platform.answers.admin import Webhook

app = typer.Typer(no_args_is_help=True, help="Where alerts of budgets are sent. Needs GRAFTWORK_ADMIN_KEY.")


@app.command()
def show(owner: OwnerArgument, as_json: JsonFlag = False) -> None:
    """Show the webhook of a tenant or an organisation.

    Example: graftwork webhooks show acme
    """
    with connect() as client:
        _show(client.admin.webhooks.get(_owner_id(client, owner)), as_json)


@app.command(name="set")
def set_webhook(
    owner: OwnerArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="An http or https address.")],
    as_json: JsonFlag = False,
) -> None:
    """Set or replace a webhook. The key of its signatures is shown only this once.

    Example: graftwork webhooks set acme https://hooks.example.com/budgets
    """
    with connect() as client:
        webhook = client.admin.webhooks.set(_owner_id(client, owner), url)
    if as_json:
        return show_json(webhook.raw)
    typer.echo(f"Alerts of {owner} go to {webhook.url}; this secret is shown this once:", err=True)
    return typer.echo(webhook.secret or "")


@app.command()
def delete(owner: OwnerArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Delete the webhook of a tenant or an organisation.

    Example: graftwork webhooks delete acme --yes
    """
    confirm(f"Delete the webhook of {owner}?", yes)
    with connect() as client:
        deleted = client.admin.webhooks.delete(_owner_id(client, owner))
    return show_json(deleted.raw) if as_json else typer.echo(f"Deleted the webhook of {owner}.")


def _owner_id(client: "Graftwork", owner: str) -> str:
    return owner if owner.startswith("org_") else tenant_id_of(client, owner)


def _show(webhook: "Webhook", as_json: bool) -> None:
    if as_json:
        return show_json(webhook.raw)
    return show_facts([("id", webhook.id), ("url", webhook.url), ("since", moment(webhook.created_at))])
