"""Runs the interactive chat of `graftwork sessions chat`.

Owns the loop that reads lines, prints events and gets the outputs of tools. Never stores anything: the server does.
Ctrl-C stops the running answer. The session is then as it was before the message.
If the server answers with an error, the chat prints the error and continues.
The chat ends at the end of the input, at `/quit`, or if the server does not answer.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import typer

from graftwork.api.cli.console.failures import advice
from graftwork.api.cli.console.output import show_json
from graftwork.api.sdk.client import Graftwork
from graftwork.api.sdk.session import Session
from graftwork.api.sdk.sessions import SessionParameters
from graftwork.api.sdk.transport.errors import APIConnectionError, APIError, ConfigurationError
from graftwork.api.sdk.transport.runtimes import SyncRuntime
from graftwork.api.sdk.transport.streams import Stream
from graftwork.api.sdk.transport.tools import ToolOutput
from graftwork.demo.tasks import HELPDESK_TOOLS, TOOLS, run_tool
from graftwork.platform.answers.session_events import (
    OutputTextDelta,
    SessionEvent,
    ToolCallDone,
    TurnAwaitingTool,
    TurnCancelled,
    TurnCompleted,
    TurnFailed,
)
from graftwork.platform.answers.sessions import PendingCall

DEMO_MODEL = "graftwork-demo"
HELP = """/fork           go on in a copy of this session; this one stays as it is
/rewind         take back your last message and what came after it
/again          try once more what failed, or what you stopped
/cache          show what the server holds of this session
/quit           leave; the session stays, and `graftwork sessions chat ID` goes on with it
Ctrl-C          stop the answer that is being made"""
UNKNOWN = "I know /fork, /rewind, /again, /cache, /help and /quit."

StartTurn = Callable[[], Stream[SessionEvent]]


def open_session(
    client: Graftwork,
    model: str | None,
    instructions: str | None,
    tools: Path | None,
    temperature: float | None = None,
) -> Session[SyncRuntime]:
    """Opens the session whose id is `model`. If `model` is not a session's id, creates a session on that model.

    If `model` is None, creates a session on the base model.
    """
    if model is not None and model.startswith("ses_"):
        return client.sessions.get(model)
    base = next(iter(client.models.list())).id
    schemas = _schemas_in(tools) if tools else _demo_schemas(base, model)
    parameters: SessionParameters = {"tools": schemas} if schemas else {}
    if instructions:
        parameters["instructions"] = instructions
    if temperature is not None:
        parameters["sampling"] = {"temperature": temperature}
    return client.sessions.create(model=model or base, **parameters)


def _schemas_in(path: Path) -> list[dict[str, Any]]:
    """Reads a list of function schemas from a JSON file. Raises ConfigurationError if the file holds anything else."""
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
    """Runs the chat in the terminal. Owns the chat's session, and the checkpoints to which `/rewind` can return.

    A checkpoint is the state of the session's history after a turn.
    """

    def __init__(self, session: Session[SyncRuntime]) -> None:
        self._session = session
        self._checkpoints: list[str | None] = []
        """For each message of this chat, the checkpoint of the session just before the message."""
        self._retry: Callable[[], None] | None = None
        """A function that sends the last turn again. It is None if that turn succeeded."""
        self._commands: Mapping[str, Callable[[], None]] = {
            "/fork": self._fork,
            "/rewind": self._rewind,
            "/again": self._again,
            "/cache": self._cache,
            "/help": lambda: typer.echo(HELP),
        }

    def talk(self) -> None:
        """Reads lines from the user, until `/quit` or the end of the input.

        Sends a line to the model as a message, or runs it as a command, such as `/fork`.
        """
        version = self._session.model.version
        model = self._session.model.name + (f"@{version}" if version else "")
        typer.echo(f"{self._session.id} on {model}. Type a message, or /help.")
        with suppress(typer.Abort):  # the end of the input
            self._obey(self._take_up)
            while (line := _asked("you")) != "/quit":
                if line.startswith("/"):
                    self._obey(self._commands.get(line, lambda: typer.echo(UNKNOWN)))
                elif line:
                    self._obey(partial(self._say, line))
        typer.echo(f"\nGo on later with: graftwork sessions chat {self._session.id}")

    def _obey(self, action: Callable[[], None]) -> None:
        """Runs the action of one line of input, and prints an error that the server sends.

        Raises APIConnectionError if the server does not answer.
        """
        try:
            action()
        except APIConnectionError:
            raise
        except APIError as refusal:
            typer.secho(advice(refusal), fg="red", err=True)

    def _say(self, text: str) -> None:
        before = self._session.head
        self._checkpoints.append(before)
        self._retry = partial(self._say, text)
        try:
            self._answer(self._take(lambda: self._session.turn(text, stream=True)))
        finally:
            if self._session.head == before:  # there is no message to take back
                self._checkpoints.pop()

    def _again(self) -> None:
        if self._retry is None:
            typer.echo("There is nothing to try again: the last turn went well.")
        else:
            self._retry()

    def _answer(self, calls: Sequence[PendingCall]) -> None:
        """Gets the outputs of the tool calls and sends them.

        If the model then calls more tools, does the same for these calls.
        """
        if calls:
            self._send([ToolOutput(call.call_id, _output_of(call)) for call in calls])

    def _send(self, outputs: Sequence[ToolOutput]) -> None:
        self._retry = partial(self._send, outputs)
        self._answer(self._take(lambda: self._session.tool_outputs(outputs, stream=True)))

    def _take(self, start: StartTurn) -> list[PendingCall]:
        """Runs a turn and prints its events. Returns the tool calls that need outputs. Ctrl-C stops only the turn."""
        try:
            with start() as events:
                return self._print(events)
        except KeyboardInterrupt:
            self._session.cancel()
            typer.secho("\n  stopped; /again tries once more", dim=True)
            return []

    def _take_up(self) -> None:
        """Continues a session whose tool calls have no outputs, or whose outputs no turn has used."""
        if self._session.status != "awaiting_tool":
            return
        given = self._session.given_outputs()
        for call in given.tool_calls:
            _show_call(call.name, call.arguments)
        if given.tool_calls:
            self._answer(given.tool_calls)
        else:
            self._send([ToolOutput(stored.call_id, stored.output) for stored in given.outputs])

    def _print(self, events: Iterable[SessionEvent]) -> list[PendingCall]:
        """Prints the events of a turn. Returns the tool calls that need outputs."""
        calls: list[PendingCall] = []
        is_within_line = False
        for event in events:
            match event:
                case OutputTextDelta(delta=delta):
                    typer.echo(delta, nl=False)
                    is_within_line = not delta.endswith("\n")
                case ToolCallDone(call_id=call_id, name=name, arguments=arguments):
                    if is_within_line:
                        typer.echo()
                        is_within_line = False
                    _show_call(name, arguments)
                    calls.append(PendingCall(call_id=call_id, name=name, arguments=arguments))
                case TurnAwaitingTool():
                    self._retry = None
                case TurnCompleted(usage=usage):
                    self._retry = None
                    share = f"{usage.cached_share:.0%} of the prompt was cached" if usage else ""
                    typer.secho(f"\n  {share}", dim=True)
                case TurnFailed(error=error):
                    failure = "no reason was given." if error is None else error["message"]
                    typer.secho(f"\nThe turn failed: {failure} /again tries once more.", fg="red", err=True)
                case TurnCancelled():
                    typer.secho("\n  the turn was cancelled; /again tries once more", dim=True)
        return calls

    def _fork(self) -> None:
        (self._session,) = self._session.fork()
        self._retry = None
        typer.echo(f"Now in {self._session.id}, a copy.")

    def _rewind(self) -> None:
        checkpoint = self._checkpoints.pop() if self._checkpoints else None
        if checkpoint is None:
            typer.echo("There is nothing to go back to: this chat has no earlier answer.")
            return
        self._session.rewind(checkpoint)
        self._retry = None
        typer.echo("Took back your last message.")

    def _cache(self) -> None:
        show_json(self._session.cache().raw)


def _asked(question: str) -> str:
    """Reads one line of input. Raises typer.Abort at the end of the input."""
    typed: str = typer.prompt(question, prompt_suffix="> ", default="", show_default=False)
    return typed.strip()


def _show_call(name: str, arguments: str) -> None:
    typer.secho(f"  → {name}({arguments})", fg="cyan")


def _output_of(call: PendingCall) -> str:
    """Returns the output of a tool call. Runs the demo's tool with this name, or else asks the user for the output."""
    try:
        output = json.dumps(run_tool(call.name, json.loads(call.arguments)), ensure_ascii=False)
    except (KeyError, TypeError, ValueError):
        return _asked(f"  output of {call.name}")
    typer.secho(f"  ← {output}", fg="cyan")
    return output
