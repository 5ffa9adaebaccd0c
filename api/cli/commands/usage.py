"""Defines `graftwork usage`, which shows what a tenant used and what that costs, and `graftwork audit`, which shows who
changed what.
"""

import csv
import sys
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.bars import show_bars
from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.output import JsonFlag, moment, show_json, show_table, size

if TYPE_CHECKING:
    from graftwork.api.cli.bench.page import Bars
    from graftwork.platform.answers.base import Page
    from graftwork.platform.answers.usage import Invoice, Money, UsageCheck, UsageRow

app = typer.Typer()

OtherTenant = Annotated[str | None, typer.Option(help="Another tenant's, with the admin key.")]
_GB_HOUR = 10**9 * 3600
_INVOICE_COLUMNS = ("price_list", "item", "quantity", "unit", "rate", "amount", "currency")


class ExportFormat(StrEnum):
    CSV = "csv"
    JSON = "json"


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    start: Annotated[str | None, typer.Option("--from", help="First moment, ISO 8601 or unix seconds.")] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Last moment, ISO 8601 or unix seconds (default: now).")
    ] = None,
    group_by: Annotated[
        str, typer.Option("--by", "--group-by", help="day, adapter, model, session, key, user, batch, tier, price, …")
    ] = "day",
    tenant: OtherTenant = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw bars instead of a table.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Also write the bars; needs graftwork[plot].")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with the table and the bars.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with all that the ledger sums.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the tokens, the memory and the costs of your tenant.

    --by takes day, adapter, model, session, key, user, batch, tier, price, organisation, and with the admin key tenant.

    Example: graftwork usage --by adapter
    """
    if context.invoked_subcommand is not None:
        return None
    if png is not None:
        from graftwork.api.cli.bench.plot import require_plots

        require_plots()
    with connect() as client:
        if tenant is None:
            rows = client.usage.list(start=start, end=end, group_by=group_by)
        else:
            tenant_id = tenant_id_of(client, tenant)
            rows = client.admin.usage(tenant_id=tenant_id, start=start, end=end, group_by=group_by)
    _write_files(rows, group_by, png, html)
    if as_csv:
        return _write_rows(rows, group_by)
    if as_json:
        return show_json(rows.raw)
    if plot:
        return _show_bars(rows, group_by)
    return _show_rows(rows, group_by)


@app.command()
def export(
    month: Annotated[str, typer.Option(help="A month in UTC, such as 2026-11.")],
    form: Annotated[ExportFormat, typer.Option("--format", help="csv or json.")] = ExportFormat.CSV,
    tenant: OtherTenant = None,
) -> None:
    """Print the invoice of a month: a line for each price list and rate. Its sums are exact.

    Example: graftwork usage export --month 2026-11 --format csv > invoice.csv
    """
    with connect() as client:
        if tenant is None:
            invoice = client.usage.invoice(month)
        else:
            invoice = client.admin.invoice(tenant_id_of(client, tenant), month)
    if form is ExportFormat.JSON:
        return show_json(invoice.raw)
    return _write_csv(invoice)


@app.command()
def check(
    start: Annotated[str | None, typer.Option("--from", help="First moment, ISO 8601 or unix seconds.")] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Last moment, ISO 8601 or unix seconds (default: now).")
    ] = None,
    settled_s: Annotated[
        float | None, typer.Option(help="Seconds after which a request without usage is a difference (600).", min=0)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare the usage ledger with what the engines reported. Exits with 1 if they differ. Needs GRAFTWORK_ADMIN_KEY.

    Example: graftwork usage check --from 2026-11-01
    """
    with connect() as client:
        found = client.admin.check_usage(start=start, end=end, settled_s=settled_s)
    if as_json:
        show_json(found.raw)
    else:
        _show_check(found)
    if found.differences:
        raise typer.Exit(1)


def _show_check(found: "UsageCheck") -> None:
    fields = ("prompt_tokens", "completion_tokens", "kv_byte_seconds", "engine_us")
    columns = ("verdict", "requests", "figure", "billed", "not billed", "engines reported")
    rows = [
        (one.verdict, one.requests, name, one.billed[name], one.unbilled[name], one.reported[name])
        for one in found.compared
        for name in fields
    ]
    show_table(columns, rows, "No request was reported in this time.")
    for one in found.compared:
        if one.examples:
            typer.echo(f"{one.verdict}: {', '.join(one.examples)}")
    for difference in found.sums:
        typer.echo(f"{difference.field}: {difference.sums} in the sums, {difference.requests} in the requests")
    for engine in found.engines:
        typer.echo(
            f"{engine.replica_id} has counted {engine.prompt_tokens} prompt and {engine.generated_tokens} generated tokens"
            " since its start."
        )
    if found.journal is not None and found.journal.open:
        typer.echo(
            f"The journal of this gateway has {found.journal.open} requests that are not in the ledger yet, of which "
            f"{found.journal.waiting} wait for the database."
        )
    typer.echo(f"{found.differences} differences between {moment(found.start)} and {moment(found.end)}.")


def _write_csv(invoice: "Invoice") -> None:
    """Writes one line for each line of the invoice. Notes about the invoice go to standard error."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("tenant", "month", *_INVOICE_COLUMNS))
    for line in invoice.lines:
        out.writerow((invoice.tenant_id, invoice.month, *(getattr(line, name) for name in _INVOICE_COLUMNS)))
    if not invoice.is_final:
        typer.echo(f"{invoice.month} is not over: the invoice will change.", err=True)
    if invoice.unpriced.requests:
        typer.echo(f"{invoice.unpriced.requests} requests had no price, and are not in the invoice.", err=True)


def _write_files(rows: "Page[UsageRow]", group_by: str, png: Path | None, html: Path | None) -> None:
    """Writes the files that were asked for."""
    if png is not None:
        from graftwork.api.cli.bench.plot import write_png

        write_png(png, "Usage", _charts(rows, group_by))
    if html is not None:
        from graftwork.api.cli.bench.page import page

        columns, table = _table(rows, group_by)
        text = page("Usage", f"By {group_by}.", columns, table, _charts(rows, group_by))
        html.write_text(text, encoding="utf-8")


def _write_rows(rows: "Page[UsageRow]", group_by: str) -> None:
    """Writes one line for each group and currency, with each sum of the ledger. A group without costs has one line."""
    from graftwork.platform.answers.usage import UsageTotals

    names = [name for name in UsageTotals.model_fields if name != "costs"]
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow((group_by, *names, "cost", "currency"))
    for row in rows:
        sums = [getattr(row, name) for name in names]
        for amount, currency in [(one.amount, one.currency) for one in row.costs] or [("", "")]:
            out.writerow(("" if row.group is None else row.group, *sums, amount, currency))


def _show_rows(rows: "Page[UsageRow]", group_by: str) -> None:
    columns, table = _table(rows, group_by)
    show_table(columns, table, "Nothing was used in this time.")


def _table(rows: "Page[UsageRow]", group_by: str) -> tuple[list[str], list[list[object]]]:
    """Returns the columns and the cells. Drafts and reasoning have a column only where there was some."""
    optional = {"drafted": [row.drafted_tokens for row in rows], "reasoning": [row.reasoning_tokens for row in rows]}
    shown = {name: values for name, values in optional.items() if any(values)}
    table: list[list[object]] = [
        [
            row.group,
            row.requests,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            *(values[number] for values in shown.values()),
            round(row.engine_ms / 1000, 3),
            round(row.kv_byte_seconds / _GB_HOUR, 6),
            size(row.adapter_bytes),
            _costs(row.costs),
        ]
        for number, row in enumerate(rows)
    ]
    columns = [group_by, "requests", "prompt", "of it cached", "completion", *shown]
    return [*columns, "engine s", "KV GB-hours", "adapters loaded", "cost"], table


def _costs(costs: "tuple[Money, ...]") -> str:
    return " + ".join(f"{one.amount} {one.currency}" for one in costs) or "no price"


def _show_bars(rows: "Page[UsageRow]", group_by: str) -> None:
    if not len(rows):
        return typer.echo("Nothing was used in this time.")
    for chart in _charts(rows, group_by):
        show_bars(f"{chart.title} ({chart.unit})", chart.values)
    return None


def _charts(rows: "Page[UsageRow]", group_by: str) -> "list[Bars]":
    """Returns the tokens of each group, and its cost in each currency."""
    from graftwork.api.cli.bench.page import Bars

    names = [row.group or "–" for row in rows]
    charts = [
        Bars(
            f"Tokens by {group_by}",
            "tokens",
            [(name, float(row.total_tokens)) for name, row in zip(names, rows, strict=True)],
        )
    ]
    currencies = sorted({cost.currency for row in rows for cost in row.costs})
    for currency in currencies:
        amounts = [
            float(sum((one.decimal for one in row.costs if one.currency == currency), Decimal(0))) for row in rows
        ]
        charts.append(Bars(f"Cost by {group_by}", currency, list(zip(names, amounts, strict=True))))
    return charts


def audit(limit: Annotated[int, typer.Option(help="How many entries.", min=1)] = 50, as_json: JsonFlag = False) -> None:
    """Show the audit entries: who changed what, and when. Needs GRAFTWORK_ADMIN_KEY.

    Example: graftwork audit --limit 20
    """
    with connect() as client:
        entries = client.admin.audit(limit=limit)
    if as_json:
        return show_json(entries.raw)
    rows = [(moment(entry.at), entry.actor_name or entry.actor, entry.action, entry.target) for entry in entries]
    return show_table(("at", "actor", "action", "target"), rows, "Nothing was changed yet.")
