"""Whether the time of an answer tells another tenant's id from one that nobody has.

    python benchmarks/foreign_ids.py [--samples 2000] [--routes GET] [--json OUT]

Runs a gateway in this process over a scripted engine and a SQLite file. Tenant A has one object of each kind. For each
route of the OpenAPI document that takes an id, tenant B asks for A's id and for one unknown id that has the same length
and begin, in a random order, `--samples` times each. All answers are a 404. It is one unknown id, because any id that was
asked for before is answered some ten microseconds sooner than a new one. The times of the two are compared by the
rank test of Mann and Whitney (two-sided, normal approximation with ties).

`p` is the chance of such a difference, or a larger one, between equal times. With many routes some small `p` are to be
expected, so it is held against 0.01 divided by the number of routes (Bonferroni). `auc` is how often the foreign id is
the slower one, 0.5 being a coin; `us` is the difference of the medians.

    holds if: no route has p < 0.01 / routes
"""

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.api.deps.test_isolation import BODIES, PEOPLES, owned_ids, routes_with_ids
from tests.api.in_process_gateway import Gateway, gateway_settings, open_gateway, write_model_folder

_ALPHA = 0.01
_WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Figure:
    """One route."""

    route: str
    p: float
    auc: float
    median_us: float
    difference_us: float


def mann_whitney(first: list[float], second: list[float]) -> tuple[float, float]:
    """Returns the two-sided p of equal times, and the share of pairs of which the first is the larger."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    n, m, rank_sum, ties, index = len(first), len(second), 0.0, 0.0, 0
    while index < len(ranked):
        end = index
        while end < len(ranked) and ranked[end][0] == ranked[index][0]:
            end += 1
        size, rank = end - index, (index + 1 + end) / 2
        rank_sum += rank * sum(1 for _, side in ranked[index:end] if side == 0)
        ties += size**3 - size
        index = end
    u, total = rank_sum - n * (n + 1) / 2, n + m
    deviation = math.sqrt(n * m / 12 * (total + 1 - ties / (total * (total - 1))))
    z = (abs(u - n * m / 2) - 0.5) / deviation if deviation else 0.0
    return math.erfc(z / math.sqrt(2)), u / (n * m)


def unknown_like(known: str, noise: random.Random) -> str:
    """Returns an id that nobody has: as long as `known`, with the same begin."""
    kept = min(len(known) - 1, max(4, len(known) - 8))
    if known.isdecimal():
        return str(noise.randrange(2, 10))
    return known[:kept] + "".join(noise.choice("0123456789abcdefghjkmnpqrstvwxyz") for _ in known[kept:])


async def measure(gateway: Gateway, samples: int, only: str) -> list[Figure]:
    owner, other = await gateway.tenant("A"), await gateway.tenant("B")
    owned = await owned_ids(gateway, owner) | {"call_id": "call_0"}
    noise = random.Random(7)
    figures = []
    for method, path, names in routes_with_ids(gateway):
        route = f"{method} {path}"
        body = BODIES.get(route, {})
        is_left_out = "files" in body or path.startswith(PEOPLES)  # an upload's time is that of its file
        if not route.startswith(only) or is_left_out:
            continue
        times: tuple[list[float], list[float]] = ([], [])
        order = [side for side in (0, 1) for _ in range(samples + _WARM_UP)]
        noise.shuffle(order)
        unknown = {name: unknown_like(owned[name], noise) for name in names}
        gc.collect()
        for side in order:
            ids = {name: owned[name] if side == 0 else unknown[name] for name in names}
            request = other.client.build_request(method, path.format(**ids), **body)
            began = time.perf_counter_ns()
            answer = await other.client.send(request)
            times[side].append((time.perf_counter_ns() - began) / 1000)
            if answer.status_code != httpx.codes.NOT_FOUND:
                raise SystemExit(f"{route} with {ids} is a {answer.status_code}: {answer.text}")
        foreign, others = (side[_WARM_UP:] for side in times)
        p, auc = mann_whitney(foreign, others)
        middle = statistics.median(others)
        figures.append(Figure(route, p, auc, middle, statistics.median(foreign) - middle))
        print(
            f"{route:62} p {p:6.4f}   auc {auc:5.3f}   {middle:7.0f} us {figures[-1].difference_us:+6.1f}", flush=True
        )
    return figures


async def run(samples: int, only: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "tiny")
        async with open_gateway(gateway_settings(Path(folder) / "data", model)) as gateway:
            return await measure(gateway, samples, only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--routes", default="", help="the begin of the routes to measure, such as 'GET /v1/sessions'")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments.samples, arguments.routes))
    limit = _ALPHA / len(figures)
    told = [figure.route for figure in figures if figure.p < limit]
    print(f"{len(figures)} routes, {arguments.samples} samples each, p below {limit:.5f}: {told or 'none'}")
    print("does not hold" if told else "holds")
    if arguments.json:
        rows = [asdict(figure) for figure in figures]
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "figures": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
