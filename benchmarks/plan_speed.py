"""How near the tokens a second of `graftwork plan` are to a measurement that the plan has not seen.

    python benchmarks/plan_speed.py [--unseen 8] [--rounds 5] [--seconds 6] [--json OUT]

Starts a demo server, and keeps 1, 4, 8 and 16 chats outstanding, for some seconds each, in turns. The plan draws its line
through the medians of all levels but `--unseen`, and says the tokens a second of that one. Little's law is checked too:
chats in a second x seconds of a chat = chats outstanding.

    holds if: the plan is within 20 % of the median, and Little's law holds to 20 % at each level
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from machine import describe_machine
from rich.console import Console
from rich.table import Table

from graftwork.api.cli.bench.load import Target
from graftwork.api.cli.bench.runs import throughput
from graftwork.api.cli.bench.servers import measured_server
from graftwork.api.cli.plan.speeds import Level, MeasuredSpeed, levels_of
from graftwork.platform.clock import SystemClock

_LEVELS = (1, 4, 8, 16)
_MODEL, _TENANT = "graftwork-demo", "bench"
_NEAR = 0.2


async def measure(rounds: int, seconds: float) -> list[Level]:
    """Returns each level of each round. The levels take turns, each round in another order."""
    clock, found = SystemClock(), list[Level]()

    async def run(target: Target, levels: tuple[int, ...]) -> None:
        phases = await throughput(target, levels, seconds, clock, lambda name, load: None)
        found.extend(levels_of({"phases": [asdict(one) for one in phases]}))

    async with measured_server(None, "", _MODEL, {_TENANT: 1.0}, {}) as server:
        await run(server.targets[_TENANT], _LEVELS)
        found.clear()  # caches and costs are warm now
        for number in range(rounds):
            start = number % len(_LEVELS)
            await run(server.targets[_TENANT], _LEVELS[start:] + _LEVELS[:start])
    return found


def medians(found: Iterable[Level]) -> list[Level]:
    """Returns one level for each number of chats outstanding, with the medians of its rounds."""
    by_number: dict[int, list[Level]] = {}
    for one in found:
        by_number.setdefault(one.outstanding, []).append(one)
    return [
        Level(
            number,
            statistics.median(one.tokens_per_s for one in some),
            statistics.median(one.chats_per_s for one in some),
            statistics.median(one.latency_s or 0.0 for one in some),
        )
        for number, some in sorted(by_number.items())
    ]


def show(levels: Sequence[Level], found: Sequence[Level], speed: MeasuredSpeed, unseen: int) -> None:
    table = Table("outstanding", "tokens/s", "least", "most", "the plan's", "of measured", "Little's law")
    for one in levels:
        rounds = [other.tokens_per_s for other in found if other.outstanding == one.outstanding]
        planned = one.outstanding / speed.step_s(one.outstanding)
        name = f"{one.outstanding}, unseen" if one.outstanding == unseen else str(one.outstanding)
        figures = [f"{value:.0f}" for value in (one.tokens_per_s, min(rounds), max(rounds), planned)]
        table.add_row(name, *figures, f"{planned / one.tokens_per_s:.2f}", f"{one.little:.2f}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unseen", type=int, default=8, choices=_LEVELS, help="the level that the plan does not see")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each level in each round")
    parser.add_argument("--json", type=Path, help="write every level of every round here")
    options = parser.parse_args()
    found = asyncio.run(measure(options.rounds, options.seconds))
    levels = medians(found)
    speed = MeasuredSpeed.fit([one for one in levels if one.outstanding != options.unseen])
    show(levels, found, speed, options.unseen)
    (unseen,) = (one for one in levels if one.outstanding == options.unseen)
    ratio = options.unseen / speed.step_s(options.unseen) / unseen.tokens_per_s
    holds = {
        "plan": abs(ratio - 1) <= _NEAR,
        "little": all(abs((one.little or 0.0) - 1) <= _NEAR for one in levels),
    }
    Console().print_json(data=holds)
    if options.json:
        record = {
            "machine": describe_machine(),
            "levels": [asdict(one) for one in found],
            "ratio": ratio,
            "holds": holds,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
