"""Defines `graftwork replicas`, which lists and drains the engines of a server."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, show_table

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import Replica

app = typer.Typer(no_args_is_help=True, help="The engines of a server. Needs GRAFTWORK_ADMIN_KEY.")


@app.command(name="list")
def list_replicas(as_json: JsonFlag = False) -> None:
    """List the engines with their load.

    Example: graftwork replicas list
    """
    with connect() as client:
        replicas = client.admin.replicas()
    if as_json:
        return show_json(replicas.raw)
    columns = ("id", "status", "epoch", "generation", "address", "running", "waiting", "adapters", "reason")
    return show_table(columns, [_row(each) for each in replicas], "No engines.")


@app.command()
def drain(
    replica_id: Annotated[str, typer.Argument(metavar="ID", help="The engine, as `graftwork replicas list` shows it.")],
    as_json: JsonFlag = False,
) -> None:
    """Drain an engine: it gets no new requests; its running ones end there or go on at another engine.

    Example: graftwork replicas drain engine-1
    """
    with connect() as client:
        replica = client.admin.drain_replica(replica_id)
    if as_json:
        return show_json(replica.raw)
    return show_facts([("id", replica.id), ("status", replica.status), ("running", replica.running_requests)])


def _row(replica: "Replica") -> tuple[object, ...]:
    adapters = None if replica.resident_adapters is None else len(replica.resident_adapters)
    return (
        replica.id,
        replica.status,
        replica.epoch,
        replica.generation,
        replica.address,
        replica.running_requests,
        replica.waiting_requests,
        adapters,
        replica.reason,
    )
