"""Defines `graftwork usage`, which shows a tenant's tokens, and `graftwork audit`, which shows who changed what."""

from typing import Annotated

import typer

from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, moment, show_json, show_table


def usage(
    start: Annotated[str | None, typer.Option("--from", help="First moment, ISO 8601 or unix seconds.")] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Last moment, ISO 8601 or unix seconds (default: now).")
    ] = None,
    group_by: Annotated[str, typer.Option(help="day, adapter, session or key.")] = "day",
    tenant: Annotated[str | None, typer.Option(help="Another tenant's usage, with the admin key.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the tokens that your tenant used.

    Example: graftwork usage --group-by adapter
    """
    with connect() as client:
        if tenant is None:
            rows = client.usage.list(start=start, end=end, group_by=group_by)
        else:
            tenant_id = tenant_id_of(client, tenant)
            rows = client.admin.usage(tenant_id=tenant_id, start=start, end=end, group_by=group_by)
    if as_json:
        return show_json(rows.raw)
    table = [(row.group, row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in rows]
    columns = (group_by, "requests", "prompt", "of it cached", "completion")
    return show_table(columns, table, "Nothing was used in this time.")


def audit(limit: Annotated[int, typer.Option(help="How many entries.", min=1)] = 50, as_json: JsonFlag = False) -> None:
    """Show the audit entries: who changed what, and when. Needs GRAFTWORK_ADMIN_KEY.

    Example: graftwork audit --limit 20
    """
    with connect() as client:
        entries = client.admin.audit(limit=limit)
    if as_json:
        return show_json(entries.raw)
    rows = [(moment(entry.at), entry.actor, entry.action, entry.target) for entry in entries]
    return show_table(("at", "actor", "action", "target"), rows, "Nothing was changed yet.")
