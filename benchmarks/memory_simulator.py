"""What do leases, eager copies and prefetches do for agents' KV, beside a plain least-recently-used cache?

    python -m benchmarks.memory_simulator [--turns N] [--seeds 3] [--seed 0] [--shape coding] [--json OUT]

The engine's own pools, tree, mover and policy run under a fake clock over a fake device (an 8 B model on 80 GB, see
simulation/hardware.py), driven by the three shapes of agent traces. Every policy sees the same sessions; answers,
tools and pauses are those of the trace, and a turn begins when its tools have answered, so a slow policy also slows
its agents. Figures are means over the seeds, with half the spread; the first turns, in which the tiers fill, are
left out of all but the bytes.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent_traces import Shape, Trace, TraceMaker
from benchmarks.machine import describe_machine
from benchmarks.simulation.hardware import Hardware, scaled
from benchmarks.simulation.policies import POLICIES, Policy
from benchmarks.simulation.tally import Figures
from benchmarks.simulation.world import Load, World
from rich.console import Console
from rich.progress import track
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Scene:
    """How one shape is played."""

    trace_factor: float
    """By which the trace's tokens are divided."""
    context_factor: float
    """How much of that shortens the contexts; the machine is scaled by the rest."""
    num_live: int
    """Sessions at a time, besides their sub-agents: so many that they reach about four times the device."""
    num_turns: int
    """Where the command does not say: enough for several of each session."""


SCENES = {
    Shape.CODING: Scene(trace_factor=128, context_factor=4, num_live=60, num_turns=2500),
    Shape.SUPPORT: Scene(trace_factor=32, context_factor=1, num_live=3000, num_turns=9000),
    Shape.RESEARCH: Scene(trace_factor=128, context_factor=4, num_live=20, num_turns=2500),
}
"""Published coding contexts reach 325,000 tokens, and Llama 3.1 has 131,072: a quarter of them fits."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace."""

    shape: Shape
    seed: int
    policy: str
    figures: Figures


def play(scene: Scene, trace: Trace, policy: Policy, num_turns: int) -> Figures:
    """One world from its first session to its last."""
    hardware = scaled(Hardware(), scene.trace_factor / scene.context_factor)
    return World(policy, Load(trace, scene.num_live, num_turns), hardware).run()


def make_trace(scene: Scene, shape: Shape, seed: int, num_turns: int) -> Trace:
    """Sessions enough for so many turns."""
    return TraceMaker(seed, scene.trace_factor).make(shape, scene.num_live + num_turns // 4)


def play_all(shapes: Sequence[Shape], seeds: Sequence[int], turns: int | None) -> Iterator[Run]:
    """Every policy on the same traces."""
    for shape in shapes:
        scene = SCENES[shape]
        num_turns = turns or scene.num_turns
        for seed in seeds:
            trace = make_trace(scene, shape, seed, num_turns)
            for policy in POLICIES:
                yield Run(shape, seed, policy.name, play(scene, trace, policy, num_turns))


# ---- the report ---------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[Figures], float]] = {
    "device %": lambda figures: 100 * figures.shares["device"],
    "host %": lambda figures: 100 * figures.shares["host"],
    "disk %": lambda figures: 100 * figures.shares["disk"],
    "recomputed %": lambda figures: 100 * figures.shares["recomputed"],
    "TTFT mean s": lambda figures: figures.mean_ttft_s,
    "TTFT p95 s": lambda figures: figures.p95_ttft_s,
    "saved TB": lambda figures: figures.moved_bytes["save"] / 1e12,
    "loaded TB": lambda figures: figures.moved_bytes["load"] / 1e12,
    "stored TB": lambda figures: figures.moved_bytes["store"] / 1e12,
    "fetched TB": lambda figures: figures.moved_bytes["fetch"] / 1e12,
    "refusals": lambda figures: float(figures.refusals),
}


def cell(values: Sequence[float]) -> str:
    """The mean, and half of what lies between the least and the most."""
    return f"{statistics.mean(values):.3g} ± {(max(values) - min(values)) / 2:.1g}"


def table(shape: Shape, runs: Sequence[Run]) -> Table:
    """All policies on one shape."""
    working_set = statistics.mean(run.figures.working_set for run in runs)
    result = Table(title=f"{shape}: the live sessions reach {working_set:.1f} × the device", title_justify="left")
    policies = list(dict.fromkeys(run.policy for run in runs))
    result.add_column("")
    for policy in policies:
        result.add_column(policy, justify="right")
    for name, read in COLUMNS.items():
        result.add_row(name, *(cell([read(run.figures) for run in runs if run.policy == one]) for one in policies))
    return result


def margins(runs: Sequence[Run]) -> dict[str, Any]:
    """Of the last policy over the first, seed by seed: points of prompt tokens found on the device, and TTFT."""
    first, last = POLICIES[0].name, POLICIES[-1].name
    by_seed = {(run.seed, run.policy): run.figures for run in runs}
    pairs = [(by_seed[seed, first], by_seed[seed, last]) for seed in sorted({run.seed for run in runs})]
    return {
        "device_points": [100 * (ours.shares["device"] - lru.shares["device"]) for lru, ours in pairs],
        "recomputed_points": [100 * (lru.shares["recomputed"] - ours.shares["recomputed"]) for lru, ours in pairs],
        "ttft_ratio": [ours.mean_ttft_s / lru.mean_ttft_s for lru, ours in pairs],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, help="of each run; else by shape")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--shape", type=Shape, choices=list(Shape), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console, shapes = Console(), options.shape or list(Shape)
    seeds = range(options.seed, options.seed + options.seeds)
    total = len(shapes) * len(seeds) * len(POLICIES)
    runs = list(track(play_all(shapes, seeds, options.turns), "playing", total=total, console=console))
    by_shape = {shape: [run for run in runs if run.shape is shape] for shape in shapes}
    for shape, some in by_shape.items():
        console.print(table(shape, some))
        console.print({name: [round(value, 3) for value in values] for name, values in margins(some).items()})
    if options.json:
        record = {
            "machine": describe_machine(),
            "turns": {str(shape): options.turns or SCENES[shape].num_turns for shape in shapes},
            "hardware": asdict(Hardware()),
            "scenes": {str(shape): asdict(SCENES[shape]) for shape in shapes},
            "margins_over_lru": {str(shape): margins(some) for shape, some in by_shape.items()},
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
