"""Prints the results of commands: tables and facts for people, JSON for programs.

Results go to standard output, and questions go to standard error. On a terminal, tables have rules and colours; in a
pipe they are plain aligned columns.
"""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from graftwork.platform.answers.base import Page

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]


def show_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Prints rows as a table. If there are no rows, prints the text `empty`, which says how to create some."""
    if not rows:
        typer.echo(empty)
        return
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    if _is_terminal():
        _rich_table(columns, cells, numeric)
        return
    widths = [max(len(row[index]) for row in [list(columns), *cells]) for index in range(len(columns))]
    for row in [[column.upper() for column in columns], *cells]:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        typer.echo("  ".join(padded).rstrip())


def note_more(page: "Page[Any]") -> None:
    """Tells on standard error if a list has more entries than the page that a command shows."""
    if page.has_more:
        typer.echo(f"Only the newest {len(page)} are shown.", err=True)


def show_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Prints the facts about one object: a name and a value in each line, with the values aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        typer.echo(f"{name.ljust(width)}  {_cell(value)}")


def confirm(question: str, yes: bool) -> None:
    """Asks the question on standard error, unless `yes` is True (the flag `--yes`).

    If the answer is no, raises typer.Abort, which exits with status 1.
    """
    if not yes:
        typer.confirm(question, abort=True, err=True)


def terminal_text(text: str) -> str:
    """Returns a model's text as it may be printed: on a terminal without the characters that could be commands to it, and
    unchanged in a pipe.
    """
    if not _is_terminal() or text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else "·" for one in text)


def moment(seconds: float | None) -> str:
    """Converts Unix seconds to a text with date and time, in UTC. None becomes a dash."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "–"


def size(num_bytes: int | None) -> str:
    """Converts a number of bytes to a text with a fitting unit, such as MiB. None becomes a dash."""
    if num_bytes is None:
        return "–"
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value) or "–"
    return str(value)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
    # Rich takes a tenth of a second to import, so it is imported only for a terminal.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*[Text(text) for text in row])
    Console().print(table)
