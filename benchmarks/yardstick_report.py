"""What the yardstick found: the samples of a run, what follows from them, and how it is shown and kept."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cells import Cell
from engine_process import OURS
from floors import MachineRates, decode_floor, median_rates, prefill_floor
from machine import describe_machine
from oracle import Verdict
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine in one cell of one round: seconds by clock, of the run to one token and of the long one."""

    engine: str
    cell: Cell
    round_number: int
    short_s: dict[str, float]
    long_s: dict[str, float]

    def prefill_s(self, clock: str) -> float:
        return self.short_s[clock]

    def decode_rate(self, clock: str, output_tokens: int) -> float:
        """Tokens a second of the whole batch."""
        return self.cell.batch * (output_tokens - 1) / max(self.long_s[clock] - self.short_s[clock], 1e-9)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Figure:
    """One engine in one cell."""

    engine: str
    cell: Cell
    decode_tokens_per_s: Spread
    prefill_s: Spread
    decode_floor_share: float
    """Least time over time taken, in (0, 1]."""
    prefill_floor_share: float
    ours_over_it_decode: float | None
    """How many times faster Graftwork is; None without Graftwork in the run."""
    ours_over_it_prefill: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run found."""

    cells: list[Cell]
    output_tokens: int
    versions: dict[str, str]
    verdicts: dict[tuple[str, Cell], Verdict]
    samples: list[Sample]
    rates: list[MachineRates]
    core: int | None

    @property
    def num_rounds(self) -> int:
        return len(self.rates)

    def figures(self, clock: str) -> list[Figure]:
        """By cell, then in the order of the engines."""
        keys = [(engine, cell) for cell in self.cells for engine in self.versions]
        return [self._figure(engine, cell, clock) for engine, cell in keys if self._of(engine, cell)]

    def _of(self, engine: str, cell: Cell) -> list[Sample]:
        return [sample for sample in self.samples if (sample.engine, sample.cell) == (engine, cell)]

    def _figure(self, engine: str, cell: Cell, clock: str) -> Figure:
        samples, rates = self._of(engine, cell), median_rates(self.rates)
        decode = Spread.of([sample.decode_rate(clock, self.output_tokens) for sample in samples])
        prefill = Spread.of([sample.prefill_s(clock) for sample in samples])
        least_step_s = decode_floor(cell, self.output_tokens, rates).seconds
        return Figure(
            engine=engine,
            cell=cell,
            decode_tokens_per_s=decode,
            prefill_s=prefill,
            decode_floor_share=least_step_s * decode.median / cell.batch,
            prefill_floor_share=prefill_floor(cell, rates).seconds / prefill.median,
            ours_over_it_decode=self._ratio(engine, cell, lambda sample: sample.decode_rate(clock, self.output_tokens)),
            ours_over_it_prefill=self._ratio(engine, cell, lambda sample: 1 / sample.prefill_s(clock)),
        )

    def _ratio(self, engine: str, cell: Cell, speed: Callable[[Sample], float]) -> float | None:
        """Ours over theirs, round by round: what slows a round slows both."""
        ours, theirs = self._of(OURS, cell), self._of(engine, cell)
        if not ours:
            return None
        return statistics.median(speed(a) / speed(b) for a, b in zip(ours, theirs, strict=True))

    # ---- shown ------------------------------------------------------------------------------------------------

    def show(self, console: Console, clock: str) -> None:
        """A table of all figures, one of our own against our base, and what the machine gives."""
        console.print(self._main_table(clock))
        if self.lora_costs(clock):
            console.print(self._lora_cost(clock))
        self._show_machine(console)

    def _main_table(self, clock: str) -> Table:
        table = Table(title=f"median of {self.num_rounds} rounds, {clock} time, {self.output_tokens} tokens", box=None)
        for column in ("cell", "engine"):
            table.add_column(column)
        for column in (
            "decode tok/s",
            "spread",
            "of floor",
            "ours/it",
            "prefill s",
            "spread",
            "of floor",
            "ours/it",
            "agrees",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        last = None
        for figure in self.figures(clock):
            if last not in (None, figure.cell):
                table.add_section()
            table.add_row(*self._cells_of(figure, is_first=figure.cell != last))
            last = figure.cell
        return table

    def _cells_of(self, figure: Figure, *, is_first: bool) -> list[str]:
        decode, prefill = figure.decode_tokens_per_s, figure.prefill_s
        verdict = self.verdicts[figure.engine, figure.cell]
        return [
            str(figure.cell) if is_first else "",
            f"[bold]{figure.engine}[/bold]" if figure.engine == OURS else figure.engine,
            f"{decode.median:.0f}",
            f"{decode.least:.0f}–{decode.most:.0f}",
            f"{figure.decode_floor_share:.0%}",
            _times(figure.ours_over_it_decode, figure.engine),
            f"{prefill.median:.3f}",
            f"{prefill.least:.3f}–{prefill.most:.3f}",
            f"{figure.prefill_floor_share:.0%}",
            _times(figure.ours_over_it_prefill, figure.engine),
            f"{verdict.agreement:.1%}",
        ]

    def lora_costs(self, clock: str) -> list[dict[str, Any]]:
        """Ours with adapters against ours without, within rounds."""
        costs = []
        for cell in self.cells:
            base, adapted = self._of(OURS, Cell(cell.batch, 0)), self._of(OURS, cell)
            if cell.adapters and base and adapted:
                pairs = list(zip(base, adapted, strict=True))
                decode = [
                    b.decode_rate(clock, self.output_tokens) / a.decode_rate(clock, self.output_tokens)
                    for a, b in pairs
                ]
                prefill = [b.prefill_s(clock) / a.prefill_s(clock) for a, b in pairs]
                costs.append(
                    {
                        "cell": str(cell),
                        "decode_share_of_base": statistics.median(decode),
                        "prefill_times_base": statistics.median(prefill),
                    }
                )
        return costs

    def _lora_cost(self, clock: str) -> Table:
        table = Table(title=f"{OURS} with adapters against {OURS} without", box=None)
        for column in ("cell", "decode speed", "prefill time"):
            table.add_column(column, justify="right")
        for cost in self.lora_costs(clock):
            table.add_row(cost["cell"], f"{cost['decode_share_of_base']:.0%}", f"{cost['prefill_times_base']:.2f}x")
        return table

    def _show_machine(self, console: Console) -> None:
        rates = median_rates(self.rates)
        console.print(
            f"\nOne core reads {rates.read_bytes_per_s / 1e9:.0f} GB/s and multiplies bf16 at "
            f"{rates.decode_flops_per_s / 1e9:.0f} GFLOP/s with 32 rows, {rates.prefill_flops_per_s / 1e9:.0f} with 512.",
            highlight=False,
        )
        exact = [verdict.worst for (engine, _), verdict in self.verdicts.items() if engine.endswith("-fp32")]
        if exact:
            console.print(
                f"In fp32 every token of {OURS} is the oracle's (worst: {max(exact):.1e} of a logit behind); "
                "the engines timed compute in bf16, where near ties may fall otherwise.",
                highlight=False,
            )
        busy = statistics.median(sample.long_s["cpu"] / sample.long_s["wall"] for sample in self.samples)
        if busy < 0.97:
            console.print(
                f"[yellow]Engines had their core for {busy:.0%} of the time: wall times are disturbed.[/yellow]"
            )

    # ---- kept -------------------------------------------------------------------------------------------------

    def write(self, path: Path, clock: str) -> None:
        """Everything, with the machine and the versions; figures in the named clock, samples in both."""
        content = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "pinned_to_core": self.core,
            "versions": self.versions,
            "output_tokens": self.output_tokens,
            "clock": clock,
            "figures": [_named(figure) for figure in self.figures(clock)],
            "lora_costs": self.lora_costs(clock),
            "rates": [asdict(one) for one in self.rates],
            "verdicts": [
                {"engine": engine, "cell": str(cell), **asdict(verdict)}
                for (engine, cell), verdict in self.verdicts.items()
            ],
            "samples": [_named(sample) for sample in self.samples],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def _named(record: Figure | Sample) -> dict[str, Any]:
    """With the cell as it is written on the command line."""
    return asdict(record) | {"cell": str(record.cell)}


def _times(ratio: float | None, engine: str) -> str:
    return "" if ratio is None or engine == OURS else f"{ratio:.2f}x"
