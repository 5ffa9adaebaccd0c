"""Defines `graftwork adapters push`, which uploads an adapter or lets the server fetch it, and `adapters uploads`."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, moment, show_json, show_table, size

if TYPE_CHECKING:
    from graftwork.api.sdk.uploads import Progress
    from graftwork.platform.answers.adapters import VersionUpload

uploads = typer.Typer(no_args_is_help=True, help="Uploads in parts and fetches that have not expired.")

_SOURCES = ("hf:", "s3:", "https:", "http:")
_RETRIES = 5
"""How often a part is sent again after its connection broke."""

Pushed = Annotated[
    str,
    typer.Argument(
        metavar="[NAME] WHAT",
        help="A PEFT folder, a GGUF file, or where the server finds one: hf:ORG/NAME@REVISION, s3://…, https://….",
    ),
]


def push(
    what: Pushed,
    second: Annotated[str | None, typer.Argument(metavar="", help="WHAT, if NAME comes first.")] = None,
    name: Annotated[str | None, typer.Option(help="The adapter's name (default: the folder's or the file's).")] = None,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="Whether the plain name may stand for this version.")
    ] = True,
    run: Annotated[str | None, typer.Option(help="The training run, as an id or an address.")] = None,
    parent: Annotated[str | None, typer.Option(help="The version it was trained from, such as support@3.")] = None,
    data_digest: Annotated[str | None, typer.Option(help="The sha256:… of the training data.")] = None,
    user: Annotated[str | None, typer.Option(help="The end user in whose limit a new adapter counts.")] = None,
    digest: Annotated[
        str | None,
        typer.Option(help="The sha256:… of the files at https://…: cat CONFIG WEIGHTS | sha256sum."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Whether to wait until the server has fetched it.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Upload a folder as the next version of an adapter, or let the server fetch it. If a version has the same files, no
    new version is made. Large weights go in parts; a push that was cut off goes on when it is called again.

    Example: graftwork adapters push ./my-lora --name support
    Example: graftwork adapters push support hf:acme/support-lora@3f2a9c0
    """
    if second is not None:
        if name is not None:
            raise typer.BadParameter("Give the name once: before the source, or with --name.")
        what, name = second, what
    fields: dict[str, Any] = {
        "promote": promote,
        "run": run,
        "parent": parent,
        "data_digest": data_digest,
        "user": user,
    }
    if what.startswith(_SOURCES):
        return _fetch(what, name, fields | {"digest": digest, "wait": wait}, as_json)
    if digest is not None or not wait:
        raise typer.BadParameter("--digest and --no-wait are for what the server fetches.")
    with connect(_RETRIES) as client, _progress("Sending") as progress:
        adapter = client.adapters.push(what, name=name, progress=progress, **fields)
    if as_json:
        return show_json(adapter.raw)
    newest = adapter.newest
    if newest is not None:
        typer.echo(f"{adapter.name}@{newest.version} is ready ({size(newest.size_bytes)}).")
    return _show_next(adapter.name, promote)


@uploads.command(name="list")
def list_uploads(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only those of this adapter.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the uploads and fetches that have not expired, the newest first.

    Example: graftwork adapters uploads list
    """
    with connect() as client:
        found = client.adapters.uploads.list(name, limit=100)
    if as_json:
        return show_json(found.raw)
    rows = [
        (one.id, one.name, one.status, _arrived(one), one.source, moment(one.expires_at), _end(one)) for one in found
    ]
    columns = ("id", "adapter", "status", "arrived", "source", "expires", "end")
    return show_table(columns, rows, "No uploads.")


@uploads.command(name="cancel")
def cancel_upload(
    upload_id: Annotated[str, typer.Argument(metavar="ID", help="The upload or fetch.")], as_json: JsonFlag = False
) -> None:
    """Cancel an upload or a fetch, and remove what has arrived. A version that it has become stays.

    Example: graftwork adapters uploads cancel upl_01hzx
    """
    with connect() as client:
        cancelled = client.adapters.uploads.cancel(upload_id)
    return show_json(cancelled.raw) if as_json else typer.echo(f"Cancelled {upload_id}.")


def _fetch(source: str, name: str | None, options: dict[str, Any], as_json: bool) -> None:
    if name is None:
        raise typer.BadParameter("Name the adapter: graftwork adapters push NAME SOURCE.")
    with connect(_RETRIES) as client, _progress("Fetching") as progress:
        upload = client.adapters.fetch(name, source, progress=progress, **options)
    if as_json:
        return show_json(upload.raw)
    if upload.version is None:
        return typer.echo(f"The server fetches {upload.source}. Look at it: graftwork adapters uploads list")
    typer.echo(f"{name}@{upload.version} is ready ({size(upload.size_bytes)}).")
    return _show_next(name, options["promote"])


def _show_next(name: str, promote: bool) -> None:
    if not promote:
        return typer.echo(f"Next: graftwork adapters promote {name} VERSION, once it is tried out.")
    return typer.echo(f'Next: use "{name}" as the model, or graftwork sessions chat {name}')


def _arrived(upload: "VersionUpload") -> str | None:
    if upload.received_bytes is None:
        return None
    return (
        f"{size(upload.received_bytes)} of {size(upload.size_bytes)}"
        if upload.size_bytes
        else size(upload.received_bytes)
    )


def _end(upload: "VersionUpload") -> str | None:
    if upload.error is not None:
        return str(upload.error["message"])
    return None if upload.version is None else f"version {upload.version}"


@contextmanager
def _progress(verb: str) -> "Generator[Progress]":
    """Shows a bar on the error output while the bytes move, if a person watches it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda arrived, total: bar.update(task, completed=arrived, total=total)
