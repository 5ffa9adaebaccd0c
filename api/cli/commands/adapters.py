"""Defines `graftwork adapters`, which uploads, lists, checks and deletes LoRA adapters, and moves their aliases."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.commands import push, rollouts
from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.flags import ModelPlace
from graftwork.api.cli.console.output import (
    JsonFlag,
    YesFlag,
    confirm,
    moment,
    show_facts,
    show_json,
    show_table,
    size,
)
from graftwork.platform.settings.settings import Settings

if TYPE_CHECKING:
    from graftwork.platform.answers.adapters import Adapter, AliasChange

app = typer.Typer(no_args_is_help=True, help="LoRA adapters and their versions. Needs GRAFTWORK_API_KEY.")
app.add_typer(rollouts.app, name="rollouts")
app.command()(push.push)
app.add_typer(push.uploads, name="uploads")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A PEFT folder: adapter_config.json and adapter_model.safetensors; or a GGUF file."
    ),
]
OfDemo = Annotated[bool, typer.Option("--demo", help="Check against the small model that ships with Graftwork.")]
Alias = Annotated[str, typer.Option(help="The alias; `prod` is what the plain name stands for.")]


@app.command(name="list")
def list_adapters(
    tag: Annotated[
        list[str] | None, typer.Option(help="Only those with this tag; give several for all of them.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only those with this text in their names.")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Those that can be restored, instead.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List your adapters.

    Example: graftwork adapters list
    """
    with connect() as client:
        adapters = client.adapters.list(limit=100, tags=tag or (), name=name, state="deleted" if deleted else None)
    if as_json:
        return show_json(adapters.raw)
    rows = [_row(adapter) for adapter in adapters]
    columns = ("name", "newest", "versions", "rank", "size", "aliases")
    return show_table(columns, rows, "No adapters yet: graftwork adapters push DIR --name NAME")


@app.command()
def show(name: NameArgument, as_json: JsonFlag = False) -> None:
    """Show an adapter's versions and aliases.

    Example: graftwork adapters show support
    """
    with connect() as client:
        adapter = client.adapters.get(name)
    if as_json:
        return show_json(adapter.raw)
    facts = [("id", adapter.id), ("name", adapter.name), ("aliases", _aliases(adapter))]
    show_facts([*facts, ("tags", ", ".join(adapter.tags or ())), ("defaults", ", ".join(adapter.defaults or ()))])
    typer.echo()
    rows = [
        (each.version, each.status, each.rank, size(each.size_bytes), moment(each.created_at), each.digest[:19])
        for each in adapter.versions
    ]
    return show_table(("version", "status", "rank", "size", "created", "digest"), rows, "No versions.")


@app.command()
def change(
    name: NameArgument,
    tag: Annotated[list[str] | None, typer.Option(help="A tag; those that are given replace all.")] = None,
    defaults: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON with system, sampling, response_format and tools; {} removes all."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change an adapter's tags, or what its requests have unless they say otherwise.

    Example: graftwork adapters change support --tag team:care --defaults defaults.json
    """
    read = None if defaults is None else read_json(defaults)
    with connect() as client:
        adapter = client.adapters.change(name, tags=tag, defaults=read)
    return show_json(adapter.raw) if as_json else typer.echo(f"Changed {name}.")


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a JSON file. Raises BadParameter."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{path} must hold a JSON object.")
    return value


@app.command()
def promote(
    name: NameArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version that shall serve.", min=1)],
    alias: Alias = "prod",
    as_json: JsonFlag = False,
) -> None:
    """Point an alias of an adapter at a version of the adapter.

    Example: graftwork adapters promote support 3
    """
    with connect() as client:
        _show_change(client.adapters.promote(name, version, alias=alias), as_json)


@app.command()
def rollback(name: NameArgument, alias: Alias = "prod", as_json: JsonFlag = False) -> None:
    """Give an adapter's alias the target that it had before. A second rollback goes back one target more.

    Example: graftwork adapters rollback support
    """
    with connect() as client:
        _show_change(client.adapters.rollback(name, alias=alias), as_json)


@app.command()
def history(name: NameArgument, alias: Alias = "prod", as_json: JsonFlag = False) -> None:
    """List the targets that an adapter's alias had, the newest first, and which key set them.

    Example: graftwork adapters history support
    """
    with connect() as client:
        events = client.adapters.history(name, alias=alias, limit=100)
    if as_json:
        return show_json(events.raw)
    rows = [(moment(each.at), _target(each.target), each.reason, each.actor) for each in events]
    return show_table(("at", "version", "reason", "by"), rows, "No changes.")


@app.command()
def restore(
    name: NameArgument,
    version: Annotated[int | None, typer.Argument(help="Only this version.", min=1)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Restore an adapter, or one of its versions, after it was deleted.

    Example: graftwork adapters restore support 2
    """
    with connect() as client:
        adapter = client.adapters.restore(name, version)
    what = name if version is None else f"{name}@{version}"
    return show_json(adapter.raw) if as_json else typer.echo(f"Restored {what}.")


@app.command()
def delete(
    name: NameArgument,
    version: Annotated[int | None, typer.Argument(help="Only this version.", min=1)] = None,
    erase: Annotated[bool, typer.Option("--erase", help="Erase it at once: it cannot be restored.")] = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete an adapter, or one of its versions. It can be restored for a time. Running requests still finish.

    Example: graftwork adapters delete support 2 --yes
    """
    what = name if version is None else f"{name}@{version}"
    confirm(f"Delete {what}?", yes)
    with connect() as client:
        deleted = client.adapters.delete(name, version, erase=erase)
    return show_json(deleted.raw) if as_json else typer.echo(f"Deleted {what}.")


@app.command()
def verify(folder: Folder, model: ModelPlace = None, demo: OfDemo = False, as_json: JsonFlag = False) -> None:
    """Check that an adapter folder fits a base model. Needs no server. Without --model, GRAFTWORK_MODEL names the base.

    Example: graftwork adapters verify ./my-lora --model ./llama
    """
    # The server's own code reads the files. It loads slowly, so it is imported only here.
    from graftwork.api.cli.commands.verify_adapter import check_adapter

    report = check_adapter(folder, Settings.from_environment({"model": model, "demo": demo or None}))
    if as_json:
        return show_json(report.body())
    show_facts(
        [
            ("base model", f"{report.model_name} ({report.model_folder})"),
            ("rank", report.rank),
            ("targets", report.target_modules),
            ("modules", report.num_modules),
            ("size", size(report.size_bytes)),
            ("digest", report.digest),
        ]
    )
    return typer.echo("Good: this adapter can be served.")


def _row(adapter: "Adapter") -> tuple[object, ...]:
    newest = adapter.newest
    return (
        adapter.name,
        newest.version if newest else None,
        len(adapter.versions),
        newest.rank if newest else None,
        size(newest.size_bytes if newest else None),
        _aliases(adapter),
    )


def _aliases(adapter: "Adapter") -> str:
    return ", ".join(f"{alias} → {_target(target)}" for alias, target in (adapter.aliases or {}).items())


def _target(target: object) -> str:
    """Converts an alias's target to text:

    `{"version": 2}` to 2, `{"weights": {"2": 0.9, "3": 0.1}}` to 2 (0.9) + 3 (0.1).
    """
    if not isinstance(target, dict):
        return "nothing" if target is None else str(target)
    if "version" in target:
        return str(target["version"])
    return " + ".join(f"{version} ({share:g})" for version, share in target.get("weights", {}).items())


def _show_change(change: "AliasChange", as_json: bool) -> None:
    if as_json:
        return show_json(change.raw)
    return typer.echo(
        f"{change.adapter}@{change.alias} → version {_target(change.target)} (before: {_target(change.previous)})"
    )
