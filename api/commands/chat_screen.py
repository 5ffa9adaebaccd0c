"""The interactive chat of `graftwork sessions chat`: reads lines, prints events, runs or asks for tools."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from graftwork.api.commands.output import show_json
from graftwork.api.sdk.client import Graftwork
from graftwork.api.sdk.errors import ConfigurationError
from graftwork.api.sdk.runtimes import SyncRuntime
from graftwork.api.sdk.session import Session
from graftwork.api.sdk.session_answers import PendingCall
from graftwork.api.sdk.session_events import (
    OutputTextDelta,
    SessionEvent,
    ToolCallDone,
    TurnCompleted,
    TurnFailed,
)
from graftwork.api.sdk.sessions import SessionParameters
from graftwork.api.sdk.tools import ToolOutput
from graftwork.demo.tasks import HELPDESK_TOOLS, TOOLS, run_tool

DEMO_MODEL = "graftwork-demo"
HELP = """/fork           go on in a copy of this session; this one stays as it is
/rewind         take back your last message and what came after it
/cache          show what the server holds of this session
/quit           leave; the session stays, and `graftwork sessions chat ID` goes on with it"""


def open_session(
    client: Graftwork, model: str | None, instructions: str | None, tools: Path | None
) -> Session[SyncRuntime]:
    """The session with the given id, or a new one on the given model or the base."""
    if model is not None and model.startswith("ses_"):
        return client.sessions.get(model)
    base = next(iter(client.models.list())).id
    schemas = _schemas_in(tools) if tools else _demo_schemas(base, model)
    parameters: SessionParameters = {"tools": schemas} if schemas else {}
    if instructions:
        parameters["instructions"] = instructions
    return client.sessions.create(model=model or base, **parameters)


def _schemas_in(path: Path) -> list[dict[str, Any]]:
    """Raises ConfigurationError."""
    try:
        schemas = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(schemas, list):
        raise ConfigurationError(f"{path} must hold a list of function schemas, as in chat completions.")
    return schemas


def _demo_schemas(base: str, model: str | None) -> list[dict[str, Any]]:
    if base != DEMO_MODEL:
        return []
    return list((HELPDESK_TOOLS if model == "helpdesk" else TOOLS).values())


class ChatScreen:
    """Owns the session that is being talked to, and the checkpoints it can go back to."""

    def __init__(self, session: Session[SyncRuntime]) -> None:
        self._session = session
        self._checkpoints: list[str | None] = []
        """The head before each message of this chat."""
        self._commands: Mapping[str, Callable[[], None]] = {
            "/fork": self._fork,
            "/rewind": self._rewind,
            "/cache": self._cache,
            "/help": lambda: typer.echo(HELP),
        }

    def talk(self) -> None:
        """Read and answer until /quit or the end of the input."""
        version = self._session.model.version
        model = self._session.model.name + (f"@{version}" if version else "")
        typer.echo(f"{self._session.id} on {model}. Type a message, or /help.")
        with suppress(typer.Abort):  # the end of the input
            self._answer(self._open_calls())
            while (line := _asked("you")) != "/quit":
                if line.startswith("/"):
                    self._commands.get(line, lambda: typer.echo("I know /fork, /rewind, /cache, /help and /quit."))()
                elif line:
                    self._say(line)
        typer.echo(f"\nGo on later with: graftwork sessions chat {self._session.id}")

    def _say(self, text: str) -> None:
        self._checkpoints.append(self._session.head)
        self._answer(self._print(self._session.turn(text, stream=True)))

    def _answer(self, calls: list[PendingCall]) -> None:
        """Answer the calls, and those that the answers lead to."""
        while calls:
            outputs = [ToolOutput(call.call_id, _output_of(call)) for call in calls]
            calls = self._print(self._session.tool_outputs(outputs, stream=True))

    def _open_calls(self) -> list[PendingCall]:
        """What an earlier chat left unanswered."""
        if self._session.status != "awaiting_tool":
            return []
        awaited = self._session.state.awaiting
        newest = self._session.items(limit=100, order="desc")
        calls = [item for item in newest if item.type == "function_call" and item.call_id in awaited]
        for call in calls:
            _show_call(call.name or "", call.arguments or "{}")
        return [
            PendingCall(call_id=each.call_id or "", name=each.name or "", arguments=each.arguments or "{}")
            for each in calls
        ]

    def _print(self, events: Iterable[SessionEvent]) -> list[PendingCall]:
        """Print a turn as it comes; the calls that it waits for."""
        calls: list[PendingCall] = []
        for event in events:
            match event:
                case OutputTextDelta(delta=delta):
                    typer.echo(delta, nl=False)
                case ToolCallDone(call_id=call_id, name=name, arguments=arguments):
                    _show_call(name, arguments)
                    calls.append(PendingCall(call_id=call_id, name=name, arguments=arguments))
                case TurnCompleted(usage=usage):
                    share = f"{usage.cached_share:.0%} of the prompt was cached" if usage else ""
                    typer.secho(f"\n  {share}", dim=True)
                case TurnFailed(error=error):
                    typer.secho(f"\nThe turn failed: {(error or {}).get('message')}", fg="red", err=True)
        return calls

    def _fork(self) -> None:
        (self._session,) = self._session.fork()
        typer.echo(f"Now in {self._session.id}, a copy.")

    def _rewind(self) -> None:
        checkpoint = self._checkpoints.pop() if self._checkpoints else None
        if checkpoint is None:
            typer.echo("There is nothing to go back to: this chat has no earlier answer.")
            return
        self._session.rewind(checkpoint)
        typer.echo("Took back your last message.")

    def _cache(self) -> None:
        show_json(self._session.cache().raw)


def _asked(question: str) -> str:
    """What is typed. Raises typer.Abort at the end of the input."""
    typed: str = typer.prompt(question, prompt_suffix="> ", default="", show_default=False)
    return typed.strip()


def _show_call(name: str, arguments: str) -> None:
    typer.secho(f"  → {name}({arguments})", fg="cyan")


def _output_of(call: PendingCall) -> str:
    """From the demo's tools where they know the call, else from whoever sits here."""
    try:
        output = json.dumps(run_tool(call.name, json.loads(call.arguments)), ensure_ascii=False)
    except (KeyError, TypeError, ValueError):
        return _asked(f"  output of {call.name}")
    typer.secho(f"  ← {output}", fg="cyan")
    return output
