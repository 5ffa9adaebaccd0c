"""Steps with a prompt beside decoding rows: how long they take beside the steps of the same rows without one.

While the rows of a cell decode, requests come one after another, each with a prompt of its own and one of the adapters
that decode already. The step that reads a prompt is the slowest until the request's only token.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

from gpu.engine_steps import StepCell, start_decoding, stop
from gpu.phase_run import PhaseRun
from gpu.random_engine import advance, close, raise_failures, random_engine, random_prompt, submit

from graftwork.engine.build.engine import Engine
from graftwork.engine.core.events import RequestFinished, RequestOutput
from graftwork.engine.core.stats import EngineStats

_WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_steps": True},
    "eager": {"overlap_steps": True, "cuda_graphs": "off"},
}
_PROMPTS, _WARM_STEPS, _DECODE_STEPS = 10, 5, 20


@dataclass(frozen=True, slots=True)
class MixedCell:
    """The rows that decode, the distinct adapters among them, and the tokens of each prompt that comes."""

    rows: int
    adapters: int
    prompt_tokens: int


_CELLS = tuple(
    MixedCell(rows, adapters, tokens)
    for rows, adapters in ((32, 16), (32, 0), (128, 16))
    for tokens in (8, 100, 500, 1500)
)


def measure_mixed(run: PhaseRun) -> None:
    """Every cell with graphs and without, overlapped."""
    cells: Sequence[MixedCell] = [MixedCell(2, 2, 5)] if run.shape.name == "tiny" else _CELLS
    for way, settings in _WAYS.items():
        with random_engine(run, **settings) as (engine, _):
            for cell in run.while_time(cells, name=partial("{} {}".format, way)):
                run.add("mixed_steps", {"way": way, "cell": asdict(cell)} | _measure(run, engine, way, cell))
            close(engine)


def _measure(run: PhaseRun, engine: Engine, way: str, cell: MixedCell) -> dict[str, float | None]:
    rows = start_decoding(run, engine, StepCell(cell.rows, cell.adapters), f"mixed {way} {cell.prompt_tokens}")
    for _ in range(_WARM_STEPS):
        advance(engine)
    before = engine.loop.stats()
    alone = [_step_ms(engine) for _ in range(_DECODE_STEPS)]
    mixed = [_slowest_ms(run, engine, (way, cell, number), cell) for number in range(_PROMPTS)]
    after = engine.loop.stats()
    stop(engine, rows)
    figures = {
        "decode_step_ms": statistics.median(alone),
        "mixed_step_ms": statistics.median(mixed),
        "slowest_step_ms": max(mixed),
        "graph_share": (_graph_steps(after) - _graph_steps(before)) / (after.steps - before.steps),
    }
    return {name: None if run.is_dry else value for name, value in figures.items()}


def _graph_steps(stats: EngineStats) -> int:
    return stats.graph_steps + stats.graph_prompt_steps


def _slowest_ms(run: PhaseRun, engine: Engine, salt: object, cell: MixedCell) -> float:
    """Returns the time of the slowest step from a request's arrival to its end."""
    outputs: list[RequestOutput] = []
    adapter = "adapter-0" if cell.adapters else None
    submit(engine, random_prompt(run.shape, salt, cell.prompt_tokens), adapter, 1, outputs)
    slowest = 0.0
    while not any(isinstance(one.event, RequestFinished) for one in outputs):
        slowest = max(slowest, _step_ms(engine))
        raise_failures(outputs)
    return slowest


def _step_ms(engine: Engine) -> float:
    started = perf_counter()
    advance(engine)
    return (perf_counter() - started) * 1e3
