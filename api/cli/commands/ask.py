"""Defines `graftwork ask`, which asks a model one question, and `graftwork models`, which lists what can be asked."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, show_json, show_table, terminal_text
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork

CUT = 3
"""The exit status if the answer was cut off at the most tokens."""


def ask(
    model: Annotated[str, typer.Argument(help="The base model or an adapter, as `graftwork models` lists them.")],
    question: Annotated[str, typer.Argument(help="The question. What is piped in follows it.")] = "",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON schema that the answer must match.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of the answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask one question, and stream the answer to standard output. What is piped in is part of the question.

    The exit status is 0 after a whole answer, 3 if the answer was cut off at the most tokens, and 1 after an error.

    Example: graftwork ask pirate "Who are you?"

    Example: git diff | graftwork ask reviewer "What does this change?"
    """
    parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    body = {name: value for name, value in parameters.items() if value is not None}
    if schema is not None:
        body["response_format"] = _response_format(schema)
    messages = [{"role": "user", "content": _whole_question(question)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    with connect() as client:
        reason = _print_whole(client, model, messages, body) if as_json else _stream(client, model, messages, body)
    if reason == "length":
        typer.echo("The answer was cut off at the most tokens: raise --max-tokens.", err=True)
        raise typer.Exit(CUT)


def models(as_json: JsonFlag = False) -> None:
    """List the names that can be asked: the base model, your adapters and their aliases.

    Example: graftwork models
    """
    with connect() as client:
        listed = client.models.list()
    if as_json:
        return show_json(listed.raw)
    rows = [
        (each.id, each.root, "base model" if each.parent is None else "adapter", each.max_model_len) for each in listed
    ]
    return show_table(("model", "serves", "kind", "context"), rows, "This server has no models.")


def _whole_question(question: str) -> str:
    """Returns the question with what was piped in. Raises ConfigurationError if there is neither."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    parts = [part for part in (question.strip(), piped) if part]
    if not parts:
        raise ConfigurationError('There is no question: give one, as in `graftwork ask MODEL "…"`, or pipe it in.')
    return "\n\n".join(parts)


def _response_format(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigurationError(f"{path} must hold a JSON schema, which is an object.")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _print_whole(client: "Graftwork", model: str, messages: list[dict[str, Any]], body: dict[str, Any]) -> str | None:
    completion = client.chat.completions.create(model=model, messages=messages, **body)
    show_json(completion.raw)
    return completion.choices[0].finish_reason if completion.choices else None


def _stream(client: "Graftwork", model: str, messages: list[dict[str, Any]], body: dict[str, Any]) -> str | None:
    """Prints the answer as it comes. Returns why it ended."""
    reason: str | None = None
    with client.chat.completions.create(model=model, messages=messages, stream=True, **body) as chunks:
        for chunk in chunks:
            typer.echo(terminal_text(chunk.text), nl=False)
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
    typer.echo()
    return reason
