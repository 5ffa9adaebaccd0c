"""Defines `graftwork batches`, which submits files of requests, and shows what becomes of them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_facts, show_json, show_table, size

if TYPE_CHECKING:
    from graftwork.platform.answers.files import Batch

app = typer.Typer(
    no_args_is_help=True, help="Batches of requests, which run when nothing else does. Needs GRAFTWORK_API_KEY."
)

BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id, batch_….")]
_CHAT = "/v1/chat/completions"
_ENDED = ("completed", "failed", "expired", "cancelled")


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file with one request in JSON a line.")],
    endpoint: Annotated[
        str | None, typer.Option(help="The path of the requests (default: the one that the first line names).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Upload a file of requests, and create a batch of them.

    Example: graftwork batches submit requests.jsonl
    """
    with connect() as client:
        uploaded = client.files.create(file)
        batch = client.batches.create(uploaded.id, endpoint=endpoint or _first_url(file))
    if as_json:
        return show_json(batch.raw)
    typer.echo(f"{batch.id} is {batch.status} ({size(uploaded.bytes)}).")
    return typer.echo(f"Next: graftwork batches show {batch.id}")


@app.command(name="list")
def list_batches(limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20, as_json: JsonFlag = False) -> None:
    """List your batches, newest first.

    Example: graftwork batches list
    """
    with connect() as client:
        batches = client.batches.list(limit=limit)
    if as_json:
        return show_json(batches.raw)
    rows = [(each.id, each.status, _progress(each), each.endpoint, moment(each.created_at)) for each in batches]
    columns = ("id", "status", "answered", "endpoint", "created")
    return show_table(columns, rows, "No batches yet: graftwork batches submit FILE")


@app.command()
def show(batch: BatchArgument, as_json: JsonFlag = False) -> None:
    """Show a batch: how far it is, what it used, and what was wrong with its input.

    Example: graftwork batches show batch_01h…
    """
    with connect() as client:
        found = client.batches.get(batch)
    if as_json:
        return show_json(found.raw)
    facts: list[tuple[str, Any]] = [
        ("id", found.id),
        ("status", found.status),
        ("answered", _progress(found)),
        ("failed", found.request_counts.failed),
        ("model", found.model),
        ("endpoint", found.endpoint),
        ("input", found.input_file_id),
        ("output", found.output_file_id),
        ("errors", found.error_file_id),
        ("tokens", found.usage.total_tokens),
        ("created", moment(found.created_at)),
        ("ends at the latest", moment(found.expires_at)),
    ]
    facts += [(f"line {one.line}" if one.line else "problem", one.message) for one in _problems(found)]
    return show_facts(facts)


@app.command()
def cancel(batch: BatchArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Cancel a batch. Requests that run are still answered, and what was answered stays.

    Example: graftwork batches cancel batch_01h…
    """
    confirm(f"Cancel {batch}? Its other requests are never answered.", yes)
    with connect() as client:
        found = client.batches.cancel(batch)
    if as_json:
        return show_json(found.raw)
    return typer.echo(f"{found.id} is {found.status}.")


@app.command()
def results(
    batch: BatchArgument,
    errors: Annotated[bool, typer.Option("--errors", help="The lines of requests without an answer, instead.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file (default: print).")
    ] = None,
) -> None:
    """Print the answers of a batch that has ended: one in JSON a line.

    Example: graftwork batches results batch_01h… --output answers.jsonl
    """
    with connect() as client:
        found = client.batches.get(batch)
        file_id = found.error_file_id if errors else found.output_file_id
        content = None if file_id is None else client.files.content(file_id)
    if content is None:
        kind = "errors" if errors else "answers"
        reason = f"has no {kind}" if found.status in _ENDED else f"is {found.status}, and has no {kind} before its end"
        typer.echo(f"{found.id} {reason}.", err=True)
        raise typer.Exit(1)
    if output is not None:
        output.write_bytes(content)
        num_lines = content.count(b"\n")
        return typer.echo(f"{output} has {num_lines} lines ({size(len(content))}).")
    return typer.echo(content, nl=False)


def _progress(batch: "Batch") -> str:
    counts = batch.request_counts
    return f"{counts.completed} of {counts.total}"


def _problems(batch: "Batch") -> Any:
    return () if batch.errors is None else batch.errors.data


def _first_url(file: Path) -> str:
    """Returns the path that the first request of a file names. A line that cannot be read is for the server to name."""
    with file.open("rb") as lines:
        try:
            url = json.loads(lines.readline())["url"]
        except (ValueError, KeyError, TypeError):
            return _CHAT
    return url if isinstance(url, str) else _CHAT
