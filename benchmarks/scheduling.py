"""Which order of waiting requests serves tenants best? First come first served, VTC and DLPM, side by side.

    python -m benchmarks.scheduling [--scene flood] [--policy vtc] [--seconds 600] [--seed 0] [--json OUT]

The engine's own scheduler, KV cache manager and session cache run in simulated time on a simulated H100 (see
simulation/step_cost.py for the seconds of a step and where they come from). Every policy sees the same clients with the
same seed (simulation/scenes.py). Tokens are counted from outputs, not from the policy's own counters.

    TTFT       seconds from sending a request to its first token; p50 and p99 of each tenant
    ITL        seconds between the tokens of an answer; p99 over all tenants
    tokens/s   tokens of prompts that were admitted, and generated tokens, per simulated second
    Jain       index of weighted service among tenants that were backlogged for 30 s on end; median and worst window
    drift      largest difference of weighted service over any time in which two tenants were backlogged
    bound      the largest difference that the policy promises
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.simulation.clients import World
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.meter import Meter, percentile
from benchmarks.simulation.orders import POLICIES, Policy
from benchmarks.simulation.scenes import SCENES, Scene
from benchmarks.simulation.timeline import Timeline
from rich.console import Console
from rich.progress import track
from rich.table import Table


@dataclass(frozen=True, slots=True)
class TenantRow:
    """What one tenant saw in one run. Times are in seconds."""

    tenant: str
    arrived: int
    finished: int
    refused: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p99: float | None
    turn_p50: float | None
    """Of agent programs: from sending a turn to its last token."""
    service_per_s: float
    """Weighted, in input tokens."""
    cached_share: float


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one scene."""

    scene: str
    policy: str
    seed: int
    seconds: float
    tenants: tuple[TenantRow, ...]
    ttft_p99: float | None
    itl_p99: float | None
    tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float
    jain_median: float | None
    jain_worst: float | None
    drift: float
    bound: float | None
    longest_wait_s: float
    """Of a request that has no token when the run ends."""
    preemptions: int
    steps: int
    wall_s: float


def simulate(scene: Scene, policy: Policy, seconds: float, seed: int, *, drain: bool = False) -> tuple[Meter, World]:
    """Runs a scene for so many simulated seconds. With `drain`, goes on until every request has ended."""
    timeline, meter = Timeline(), Meter()
    engine = SimulatedEngine(timeline, scene.machine, policy.order)
    world = World(engine, meter, seconds)
    clients = scene.clients(seed)
    domains = {client.tenant.name: client.tenant.domain for client in clients}

    def observe() -> None:
        backlogged = {name for name, domain in domains.items() if engine.order.size_of(domain).requests}
        meter.observe(backlogged, timeline.now)

    engine.after_admit = observe
    for client in clients:
        client.start(world)
    timeline.run(None if drain else seconds)
    engine.scheduler.check_integrity()
    return meter, world


def measure(scene: Scene, policy: Policy, seconds: float, seed: int) -> Run:
    """Runs one policy in one scene, and returns its figures."""
    started = time.perf_counter()
    meter, world = simulate(scene, policy, seconds, seed)
    everybody = meter.tenants.values()
    prompt, cached = sum(one.prompt_tokens for one in everybody), sum(one.cached_tokens for one in everybody)
    output = sum(one.output_tokens for one in everybody)
    rows = tuple(_row(name, meter, seconds) for name in sorted(meter.tenants))
    weights = [one.weight for one in everybody]
    return Run(
        scene=scene.name,
        policy=policy.name,
        seed=seed,
        seconds=seconds,
        tenants=rows,
        ttft_p99=percentile((value for one in everybody for value in one.ttft_s), 0.99),
        itl_p99=percentile((value for one in everybody for value in one.gaps_s), 0.99),
        tokens_per_s=(prompt + output) / seconds,
        output_tokens_per_s=output / seconds,
        cached_share=cached / max(prompt, 1),
        jain_median=statistics.median(meter.jain_by_window) if meter.jain_by_window else None,
        jain_worst=min(meter.jain_by_window, default=None),
        drift=max(meter.drift.widest.values(), default=0.0),
        bound=policy.bound(meter.longest_input, scene.machine.kv_tokens, min(weights)),
        longest_wait_s=meter.longest_wait_s(world.now),
        preemptions=world.engine.scheduler.counters.preemptions,
        steps=world.engine.work.steps,
        wall_s=time.perf_counter() - started,
    )


def _row(name: str, meter: Meter, seconds: float) -> TenantRow:
    figures = meter.tenants[name]
    return TenantRow(
        tenant=name,
        arrived=figures.arrived,
        finished=figures.finished,
        refused=figures.refused,
        ttft_p50=percentile(figures.ttft_s, 0.5),
        ttft_p99=percentile(figures.ttft_s, 0.99),
        itl_p99=percentile(figures.gaps_s, 0.99),
        turn_p50=percentile(figures.turn_s, 0.5),
        service_per_s=meter.service[name] / seconds,
        cached_share=figures.cached_tokens / max(figures.prompt_tokens, 1),
    )


def measure_all(scenes: Sequence[Scene], policies: Sequence[Policy], seconds: float, seed: int) -> Iterator[Run]:
    """Runs every policy in every scene."""
    for scene in scenes:
        for policy in policies:
            yield measure(scene, policy, seconds, seed)


# ---- the report ---------------------------------------------------------------------------------------------------

TOTALS: dict[str, Callable[[Run], float | None]] = {
    "tokens/s": lambda run: run.tokens_per_s,
    "output tokens/s": lambda run: run.output_tokens_per_s,
    "cached %": lambda run: 100 * run.cached_share,
    "ITL p99 ms": lambda run: None if run.itl_p99 is None else 1000 * run.itl_p99,
    "Jain median": lambda run: run.jain_median,
    "Jain worst": lambda run: run.jain_worst,
    "drift / 1000": lambda run: run.drift / 1000,
    "bound / 1000": lambda run: None if run.bound is None else run.bound / 1000,
    "longest wait s": lambda run: run.longest_wait_s,
    "preemptions": lambda run: run.preemptions,
    "steps": lambda run: run.steps,
    "wall s": lambda run: run.wall_s,
}
PER_TENANT: dict[str, Callable[[TenantRow], float | None]] = {
    "TTFT p50 s": lambda row: row.ttft_p50,
    "TTFT p99 s": lambda row: row.ttft_p99,
    "turn p50 s": lambda row: row.turn_p50,
    "service/s": lambda row: row.service_per_s,
    "finished": lambda row: row.finished,
}


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(runs: Sequence[Run]) -> Table:
    """Returns one row for each figure and one column for each policy. `runs` are of one scene."""
    machine = SCENES[runs[0].scene].machine.name
    result = Table(title=f"{runs[0].scene}: {runs[0].seconds:.0f} simulated seconds of {machine}", title_justify="left")
    result.add_column("")
    for run in runs:
        result.add_column(run.policy, justify="right")
    for name, total in TOTALS.items():
        result.add_row(name, *(_cell(total(run)) for run in runs))
    for rows in zip(*(run.tenants for run in runs), strict=True):
        result.add_section()
        for name, read in PER_TENANT.items():
            if any(read(row) is not None for row in rows):
                result.add_row(f"{rows[0].tenant}: {name}", *(_cell(read(row)) for row in rows))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", choices=list(SCENES), action="append")
    parser.add_argument("--policy", choices=list(POLICIES), action="append")
    parser.add_argument("--seconds", type=float, default=600.0, help="simulated, of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console()
    scenes = [SCENES[name] for name in options.scene or SCENES]
    policies = [POLICIES[name] for name in options.policy or POLICIES]
    every = measure_all(scenes, policies, options.seconds, options.seed)
    runs = list(track(every, "simulating", total=len(scenes) * len(policies), console=console))
    for scene in scenes:
        console.print(table([run for run in runs if run.scene == scene.name]))
    if options.json:
        record = {
            "machine": describe_machine(),
            "simulated": {scene.name: asdict(scene.machine) for scene in scenes},
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
