"""Prints the demo's report: transcripts, a table of figures, and the statements that the demo has checked.

Owns how the report looks and how its figures are computed. Never talks to the server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import typer

from graftwork.api.cli.console.output import show_json, show_table
from graftwork.api.cli.demo.conversation import Exchange, Talk


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about Graftwork that the demo checks.

    `holds` says whether the statement was true in this run, and `found` is the measured value.
    """

    text: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured figures of one session, such as its token counts and its speed."""

    session: str
    turns: int
    calls: int
    prompt_tokens: int
    cached_share: float
    completion_tokens: int
    tokens_per_s: float
    ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the whole demo: its conversations, its checked statements, and how long it took."""

    talks: tuple[Talk, ...]
    claims: tuple[Claim, ...]
    max_adapters_in_a_step: int | None
    seconds: float

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def body(self) -> dict[str, Any]:
        return {
            "ok": self.holds,
            "seconds": round(self.seconds, 1),
            "max_adapters_in_a_step": self.max_adapters_in_a_step,
            "sessions": [asdict(figures_of(talk)) for talk in self.talks],
            "claims": [asdict(claim) for claim in self.claims],
        }


def figures_of(talk: Talk) -> Figures:
    """Computes the figures of one conversation.

    The speed is the number of completion tokens, divided by the seconds of all turns. The client measures these seconds
    from each request to its last event, so they include the wait in the server's queue.
    """
    turns = talk.turns
    prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    completion = sum(turn.completion_tokens for turn in turns)
    seconds = sum((turn.ended_at or turn.started_at) - turn.started_at for turn in turns)
    waits = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    return Figures(
        session=talk.label,
        turns=len(turns),
        calls=sum(len(turn.calls) for turn in turns),
        prompt_tokens=prompt,
        cached_share=round(cached / prompt, 3) if prompt else 0.0,
        completion_tokens=completion,
        tokens_per_s=round(completion / seconds, 1) if seconds else 0.0,
        ttft_ms=round(median(waits) * 1000, 1) if waits else None,
    )


def show_report(report: Report, as_json: bool) -> None:
    if as_json:
        show_json(report.body())
        return
    typer.echo()
    show_table(_COLUMNS, [_row(figures_of(talk)) for talk in report.talks], "Nobody said anything.")
    typer.echo()
    for claim in report.claims:
        typer.secho(f"{'✓' if claim.holds else '✗'} {claim.text}: {claim.found}", fg=None if claim.holds else "red")
    typer.echo(f"\nThe story took {report.seconds:.0f} s.")
    if not report.holds:
        broken = "; ".join(claim.text for claim in report.claims if not claim.holds)
        typer.echo(f"Error: this run does not bear out: {broken}", err=True)


_COLUMNS = ("session", "turns", "calls", "prompt", "cached", "made", "tokens/s", "TTFT ms")


def _row(figures: Figures) -> tuple[object, ...]:
    shown = f"{figures.cached_share:.0%}"
    amounts = (figures.completion_tokens, figures.tokens_per_s, figures.ttft_ms)
    return (figures.session, figures.turns, figures.calls, figures.prompt_tokens, shown, *amounts)


def show_exchanges(label: str, exchanges: Iterable[Exchange]) -> None:
    """Prints each user message of these exchanges, with its tool calls and its answer."""
    typer.secho(f"\n{label}", bold=True)
    for exchange in exchanges:
        typer.echo(f"  user   {exchange.ask.text}")
        for call, result in exchange.results:
            typer.secho(f"         → {call.name}({call.arguments})", fg="cyan")
            typer.secho(f"         ← {result}", fg="cyan")
        typer.echo(f"  model  {exchange.answer}")


def show_step(number: int, text: str) -> None:
    typer.secho(f"\n{number}. {text}", bold=True, fg="green")


def share_of(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)}"
