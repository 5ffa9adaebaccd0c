"""Defines `graftwork sessions`, which lists, shows, continues and closes the conversations that the server stores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, moment, show_facts, show_json, show_table

if TYPE_CHECKING:
    from graftwork.api.sdk.session import Session
    from graftwork.api.sdk.transport.runtimes import SyncRuntime
    from graftwork.platform.answers.sessions import Item, PinnedModel

app = typer.Typer(no_args_is_help=True, help="Conversations that the server remembers. Needs GRAFTWORK_API_KEY.")

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id, ses_….")]


@app.command(name="list")
def list_sessions(limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20, as_json: JsonFlag = False) -> None:
    """List your sessions, newest first.

    Example: graftwork sessions list
    """
    with connect() as client:
        sessions = client.sessions.list(limit=limit)
    if as_json:
        return show_json(sessions.raw)
    rows = [(each.id, each.status, _model(each.model), moment(each.created_at)) for each in sessions]
    return show_table(("id", "status", "model", "created"), rows, "No sessions yet: graftwork sessions chat opens one.")


@app.command()
def show(
    session: SessionArgument,
    tree: Annotated[
        bool, typer.Option("--tree", help="Its turns and forks as a tree, with tokens and cache tiers.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a session and its transcript, or with --tree its turns and forks.

    Example: graftwork sessions show ses_01h…
    """
    if tree:
        return _show_tree(session, as_json=as_json)
    with connect() as client:
        found = client.sessions.get(session)
        items = _transcript(found)
    if as_json:
        return show_json({**found.state.raw, "items": [item.raw for item in items]})
    show_facts(
        [
            ("id", found.id),
            ("status", found.status),
            ("model", _model(found.model)),
            ("head", found.head),
            ("created", moment(found.state.created_at)),
        ]
    )
    typer.echo()
    for item in items:
        typer.echo(_line(item))
    return None


@app.command()
def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="An adapter or the base model, or a session's id to go on with (default: the base)."),
    ] = None,
    instructions: Annotated[str | None, typer.Option(help="The system message of a new session.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON list of function schemas (default: the demo's, on its model)."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of a new session; 0 always takes the likeliest token.")
    ] = None,
) -> None:
    """Talk to a model in this terminal. If a tool is not one of the demo's, you type its output.

    Within the chat: /fork, /rewind, /again, /cache, /help, /quit; Ctrl-C stops an answer.

    Example: graftwork sessions chat pirate
    """
    from graftwork.api.cli.console.chat_screen import ChatScreen, open_session

    with connect(max_retries=2) as client:  # a broken stream is resumed
        session = open_session(client, model, instructions, tools, temperature)
        ChatScreen(session).talk()


@app.command()
def close(session: SessionArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Close a session. It can still be read until its retention time is over.

    Example: graftwork sessions close ses_01h… --yes
    """
    confirm(f"Close {session}?", yes)
    with connect() as client:
        state = client.sessions.get(session).close()
    return show_json(state.raw) if as_json else typer.echo(f"Closed {session}.")


def _show_tree(session: str, *, as_json: bool) -> None:
    from graftwork.api.cli.console.session_tree import read_tree, tree_body, tree_lines

    with connect() as client:
        found = read_tree(client, session)
    if as_json:
        return show_json(tree_body(found))
    return typer.echo("\n".join(tree_lines(found)))


def _transcript(session: "Session[SyncRuntime]") -> "list[Item]":
    """Reads all items of a session's history, page by page."""
    page = session.items(limit=100, order="asc")
    items = list(page)
    while page.has_more:
        page = session.items(limit=100, order="asc", after=page.last_id)
        items += page
    return items


def _model(model: "PinnedModel") -> str:
    return model.name if model.version is None else f"{model.name}@{model.version}"


def _line(item: "Item") -> str:
    match item.type:
        case "function_call":
            return f"  call    {item.name}({item.arguments})"
        case "custom_tool_call":
            return f"  call    {item.name}({item.input})"
        case "function_call_output" | "custom_tool_call_output":
            return f"  result  {item.output}"
    return f"{item.role or item.type}: {item.text}"
