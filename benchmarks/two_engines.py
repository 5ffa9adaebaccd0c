"""What does a second engine gain on one machine, and who has the processors?

    chats, N at a time ──► serve --replicas 1 or 2 ──► tokens a second, and the CPU time of engines, gateway and load

Rounds take one engine and two in turns. For each number of outstanding chats the program prints tokens a second, the
cores that the engines, the gateway and this program used, and the cores that were idle. There are two loads: stories of 64
tokens, of which the gateway's part is large, and long prompts with short answers, as agents have. With as many busy
engines as cores, the gateway and the load take from the engines: `bound` is the ratio that two cores allow by the CPU time
of a token, if one engine has a core for itself.

    python -m benchmarks.two_engines --rounds 2 --json benchmarks/results/two_engines-DATE.json
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from benchmarks.machine import describe_machine

from graftwork.api.cli.bench.load import ChatShape
from graftwork.api.cli.bench.runs import STORY, run_phase
from graftwork.api.cli.bench.servers import measured_server
from graftwork.platform.clock import SystemClock

_MODEL = "graftwork-demo"
_CORES = 2
_SHAPES = {"stories": STORY, "prompts": ChatShape(words=280, max_tokens=16)}
_ENGINE_MODULE = "graftwork.api.server.engine_process"


@dataclass(frozen=True, slots=True)
class Level:
    """One number of outstanding chats with one number of engines. CPU is in cores."""

    load: str
    replicas: int
    outstanding: int
    tokens_per_s: float
    """Prompt tokens that were computed, and tokens of answers."""
    engines_cpu: tuple[float, ...]
    gateway_cpu: float
    load_cpu: float
    idle_cpu: float


@dataclass(frozen=True, slots=True)
class _Clocks:
    """CPU seconds so far."""

    at: float
    engines: dict[int, float]
    gateway: float
    load: float
    idle: float


def _read_clocks(server_id: int) -> _Clocks:
    engines: dict[int, float] = {}
    gateway = 0.0
    server = psutil.Process(server_id)
    for process in (server, *server.children(recursive=True)):
        times = process.cpu_times()
        seconds = times.user + times.system
        if _ENGINE_MODULE in process.cmdline():
            engines[process.pid] = seconds
        else:
            gateway += seconds
    own = psutil.Process().cpu_times()
    return _Clocks(time.monotonic(), engines, gateway, own.user + own.system, psutil.cpu_times().idle)


async def measure(name: str, replicas: int, levels: tuple[int, ...], seconds: float) -> list[Level]:
    """Measures a server with so many engines at each level of one load."""
    found, clock = [], SystemClock()
    settings = {"replicas": str(replicas)}
    async with measured_server(None, "", _MODEL, {"tenant": 1.0}, settings) as server:
        assert server.process_id is not None
        target, shape = server.targets["tenant"], _SHAPES[name]

        async def run(level: int, seconds: float, topic: str) -> float:
            phase = await run_phase(
                topic,
                lambda load: [load.closed("tenant", target, shape, level, seconds)],
                seconds,
                clock,
                lambda name, load: None,
            )
            return phase.computed_per_s

        await run(max(levels), 3.0, "warm")  # all engines
        for level in levels:
            before = _read_clocks(server.process_id)
            tokens_per_s = await run(level, seconds, f"{level} outstanding")
            after = _read_clocks(server.process_id)
            found.append(_level(name, replicas, level, tokens_per_s, before, after))
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _level(name: str, replicas: int, outstanding: int, tokens_per_s: float, before: _Clocks, after: _Clocks) -> Level:
    took = after.at - before.at

    def cores(start: float, end: float) -> float:
        return round((end - start) / took, 3)

    return Level(
        name,
        replicas,
        outstanding,
        round(tokens_per_s, 1),
        tuple(cores(before.engines[one], after.engines[one]) for one in sorted(before.engines)),
        cores(before.gateway, after.gateway),
        cores(before.load, after.load),
        cores(before.idle, after.idle),
    )


def _ratios(found: list[Level]) -> list[dict[str, object]]:
    """By load and outstanding chats: the median tokens a second of two engines over those of one, and the bound."""
    rows = []
    for name, level in sorted({(one.load, one.outstanding) for one in found}):
        by_replicas = {
            replicas: [one for one in found if (one.load, one.outstanding, one.replicas) == (name, level, replicas)]
            for replicas in (1, 2)
        }
        speeds = {number: statistics.median(one.tokens_per_s for one in own) for number, own in by_replicas.items()}
        costs = {number: statistics.median(map(_token_cpu_s, own)) for number, own in by_replicas.items()}
        engine_s = statistics.median(sum(one.engines_cpu) / one.tokens_per_s for one in by_replicas[1])
        alone = min(1 / engine_s, _CORES / costs[1])
        rows.append(
            {
                "load": name,
                "outstanding": level,
                "ratio": round(speeds[2] / speeds[1], 3),
                "bound": round(_CORES / costs[2] / alone, 3),
            }
        )
    return rows


def _token_cpu_s(level: Level) -> float:
    """The CPU seconds of a token in all processes."""
    return (sum(level.engines_cpu) + level.gateway_cpu + level.load_cpu) / level.tokens_per_s


def main() -> None:
    """Measures some rounds, and prints or stores what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine, found = describe_machine(), list[Level]()
    for number in range(options.rounds):
        for replicas in (1, 2) if number % 2 == 0 else (2, 1):
            for name in options.loads:
                found += asyncio.run(measure(name, replicas, tuple(options.levels), options.seconds))
    ratios = _ratios(found)
    for row in ratios:
        print(json.dumps(row))
    if options.json:
        body = {"machine": machine, "levels": [asdict(one) for one in found], "ratios": ratios}
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
