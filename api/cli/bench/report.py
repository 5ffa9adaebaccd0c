"""Shows what a measurement has found: a table and verdicts on the terminal, or JSON, and files with charts.

Owns the forms of a report. Never computes a figure.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from graftwork.api.cli.bench.page import Bars, Claim, Lines, page
from graftwork.api.cli.bench.plot import write_png
from graftwork.api.cli.bench.runs import Phase
from graftwork.api.cli.bench.terminal_plot import plot as plot_text
from graftwork.api.cli.console.output import show_json, show_table

_PHASE_COLUMNS = (
    "phase",
    "tenant",
    "sent",
    "answered",
    "refused",
    "failed",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "ITL p99 ms",
    "tokens/s",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What one measurement has found, in all forms."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    charts: Sequence[Bars | Lines]
    body: dict[str, Any]
    """What `--json` prints besides the claims."""
    claims: Sequence[Claim] = ()

    def publish(self, html: Path | None, png: Path | None, *, plot: bool = False, as_json: bool) -> None:
        """Writes the files, and prints the report, with `plot` also its charts. Beside JSON, charts go to standard error.

        Raises typer.Exit with status 1 if a claim does not hold."""
        if html is not None:
            text = page(self.title, self.note, self.columns, self.rows, self.charts, self.claims)
            html.write_text(text, encoding="utf-8")
        if png is not None:
            write_png(png, self.title, self.charts)
        if as_json:
            show_json(self.body | {"claims": [asdict(claim) for claim in self.claims]})
        else:
            show_table(self.columns, self.rows, "Nothing was sent.")
            for claim in self.claims:
                typer.echo(f"{claim.verdict.ljust(9)}  {claim.text} ({claim.found})")
        if plot:
            typer.echo("\n" + plot_text(self.charts), err=as_json)
        if any(claim.holds is False for claim in self.claims):
            raise typer.Exit(1)


def phases_report(
    title: str, server: str, phases: Sequence[Phase], body: dict[str, Any], claims: Sequence[Claim] = ()
) -> Report:
    """Returns the report of phases of chats. `server` says which server was measured."""

    def bars(name: str, unit: str, values: Sequence[float | None]) -> Bars:
        labels = [f"{one.tenant}, {phase.name}" for phase in phases for one in phase.tenants]
        return Bars(name, unit, list(zip(labels, values, strict=True)))

    tenants = [(phase, one) for phase in phases for one in phase.tenants]
    rows = [
        (phase.name, *(one.tenant, one.sent, one.answered, one.refused, one.failed), *map(ms, latencies), speed)
        for phase, one in tenants
        for latencies, speed in [((one.ttft_p50, one.ttft_p99, one.itl_p99), round(one.tokens_per_s, 1))]
    ]
    charts = [
        bars("Time to first token, p99", "ms", [ms(one.ttft_p99) for _, one in tenants]),
        bars("Throughput", "tokens/s", [one.tokens_per_s for _, one in tenants]),
    ]
    seconds = phases[0].seconds if phases else 0
    return Report(title, f"Server: {server}. Phases of {seconds:g} s.", _PHASE_COLUMNS, rows, charts, body, claims)


def ms(seconds: float | None) -> float | None:
    """Returns seconds in milliseconds, with one decimal."""
    return None if seconds is None else round(1000 * seconds, 1)
