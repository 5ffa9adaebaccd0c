"""Defines `graftwork prices`, which shows and sets what requests cost."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect, tenant_id_of
from graftwork.api.cli.console.flags import sent_moment
from graftwork.api.cli.console.output import JsonFlag, moment, show_json, show_table

if TYPE_CHECKING:
    from graftwork.platform.answers.usage import PriceList

app = typer.Typer(no_args_is_help=True, help="What requests cost. Needs GRAFTWORK_ADMIN_KEY.")

OwnTenant = Annotated[
    str | None, typer.Option("--tenant", help="The tenant with these prices (default: all without their own).")
]
_RATES = ("input", "output", "input_device", "input_host", "input_disk", "kv_gb_hour", "adapter_gb")
_PER_MILLION = "per million tokens"


@app.command()
def show(
    tenant: Annotated[str | None, typer.Option(help="Only the price lists of this tenant.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also lists that newer ones have replaced.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the price lists that are in force, and those that begin later.

    Example: graftwork prices show --all
    """
    with connect() as client:
        tenant_id = None if tenant is None else tenant_id_of(client, tenant)
        lists = client.admin.prices.list(tenant_id=tenant_id)
    if as_json:
        return show_json(lists.raw)
    now = time.time()
    return _show([one for one in lists if everything or one.in_force or one.valid_from > now])


@app.command(name="set")
def set_prices(
    rates: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=PRICE…",
            help=f"input and output, {_PER_MILLION}; input_device, input_host, input_disk for cached prompt tokens "
            "(default: as input); kv_gb_hour; adapter_gb.",
        ),
    ],
    currency: Annotated[str, typer.Option(help="A code of three letters.")] = "USD",
    tenant: OwnTenant = None,
    tier: Annotated[
        str | None, typer.Option(help="flex, default or priority (default: all without their own).")
    ] = None,
    valid_from: Annotated[str | None, typer.Option("--from", help="ISO 8601 or unix seconds (default: now).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Set prices. Requests from now on, or from --from on, have them. All gateways follow within a second.

    Example: graftwork prices set input=0.50 input_device=0.05 output=1.50 kv_gb_hour=0.02
    """
    given = _parsed(rates)
    with connect() as client:
        tenant_id = None if tenant is None else tenant_id_of(client, tenant)
        found = client.admin.prices.set(
            currency, given, tenant_id=tenant_id, service_tier=tier, valid_from=sent_moment(valid_from)
        )
    if as_json:
        return show_json(found.raw)
    return _show([found])


def _parsed(rates: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in rates]
    for name, equals, price in pairs:
        if name not in _RATES or not equals or not price:
            raise typer.BadParameter(f"{name + equals + price!r}: give NAME=PRICE, with a NAME of {', '.join(_RATES)}")
    return {name: price for name, _, price in pairs}


def _show(lists: "list[PriceList]") -> None:
    rows = [
        (
            one.id,
            one.tenant_id or "all",
            one.service_tier or "all",
            one.currency,
            *(getattr(one.rates, name) for name in _RATES),
            "now" if one.in_force else moment(one.valid_from),
        )
        for one in lists
    ]
    columns = (
        "id",
        "tenant",
        "tier",
        "currency",
        "input",
        "output",
        "device",
        "host",
        "disk",
        "KV GB-h",
        "adapter GB",
        "from",
    )
    show_table(columns, rows, "Nothing has a price yet: graftwork prices set input=0.50 output=1.50")
