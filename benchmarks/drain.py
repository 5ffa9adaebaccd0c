"""Measures what draining one of several engines costs the agents that it serves.

    agents stream turns ──► one engine drains ──► its sessions go on at the others, with pages from the shared disk

Three engines and two gateways share leases and a disk of KV files. Reported: requests that failed or were refused while
the engine drained, the seconds until its process had ended, the longest turn, and for each session that moved which
part of its history was in a cache tier at its next turn. A session has moved if less than four fifths of its history
were on the device then: the engines that do not drain have room for all of theirs.

    python -m benchmarks.drain --agents 24 --json benchmarks/results/drain-DATE.json
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import httpx
from benchmarks.machine import describe_machine

from graftwork.api.cli.chaos.agent_streams import StreamedTurn, StreamingAgent
from graftwork.api.cli.chaos.faults import progress_after
from graftwork.api.cli.chaos.fleet import ADMIN_KEY
from graftwork.api.cli.chaos.whole_fleet import FleetPlan, WholeFleet, whole_fleet

_log = logging.getLogger(__name__)

_STAYED = 0.8
_DRAINED = 1
"""The engine that drains."""
_END_WITHIN_S = 120.0
_TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Drain:
    """What one drain did."""

    agents: int
    turns_meanwhile: int
    failed: int
    """Turns that failed, refusals and cut connections, from the drain on."""
    seconds: float
    """From the drain until the engine's process had ended."""
    longest_turn_s: float
    sessions: int
    """Sessions that went on after the drain had begun."""
    sessions_moved: int
    cached_share: float | None
    """The tokens in a tier, of all tokens of the histories of the sessions that moved. None if none moved."""
    least_share: float | None
    """The same of the session that had the least."""
    exit_status: int | None


async def measure(folder: Path, agents: int, warm_s: float, store: str = "auto") -> Drain:
    """Starts a fleet, loads it for `warm_s` seconds, and drains one of its engines."""
    async with whole_fleet(folder, FleetPlan(engines=3, gateways=2, store=store)) as fleet, AsyncExitStack() as stack:
        headers = {"authorization": f"Bearer {await fleet.tenant('acme', 2 * agents)}"}
        http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, trust_env=False))
        clients = [StreamingAgent(fleet, http, random.Random(number), leaves=0.0) for number in range(agents)]
        async with asyncio.TaskGroup() as group:
            is_over = asyncio.Event()
            for client in clients:
                group.create_task(client.run(is_over))
            await progress_after(clients, time.monotonic())
            await asyncio.sleep(warm_s)
            refused, began_at = sum(map(_failures, clients)), time.monotonic()
            await _drain(fleet)
            status = await _end_of(fleet)
            ended_at = time.monotonic()
            await progress_after(clients, ended_at)
            await progress_after(clients, time.monotonic())
            is_over.set()
        return _found(clients, sum(map(_failures, clients)) - refused, began_at, ended_at, status)


def _failures(client: StreamingAgent) -> int:
    return client.num_refused + len(client.failed) + client.num_reconnects


async def _drain(fleet: WholeFleet) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=30) as admin:
        path = f"/v1/admin/replicas/{fleet.engines[_DRAINED].name}/drain"
        (await admin.post(fleet.urls[0] + path)).raise_for_status()


async def _end_of(fleet: WholeFleet) -> int | None:
    """Waits until the drained engine's process has ended. Returns its exit status."""
    process = fleet.engines[_DRAINED].process
    assert process is not None
    return await asyncio.to_thread(process.wait, _END_WITHIN_S)


def _found(clients: list[StreamingAgent], failed: int, began_at: float, ended_at: float, status: int | None) -> Drain:
    meanwhile = [turn for client in clients for turn in client.turns if turn.times and turn.times[-1] >= began_at]
    pairs = [pair for client in clients if (pair := _first_after(client, began_at))]
    moved = [(before, after) for before, after in pairs if after.cache["device_tokens"] < _STAYED * _history(before)]
    shares = [min(_cached(after) / _history(before), 1.0) for before, after in moved]
    weights = [_history(before) for before, _ in moved]
    weighed = sum(share * weight for share, weight in zip(shares, weights, strict=True))
    for before, after in pairs:
        _log.debug("history %d, then %s", _history(before), after.cache)
    return Drain(
        agents=len(clients),
        turns_meanwhile=len(meanwhile),
        failed=failed,
        seconds=ended_at - began_at,
        longest_turn_s=max(turn.times[-1] - turn.times[0] for turn in meanwhile),
        sessions=len(pairs),
        sessions_moved=len(moved),
        cached_share=weighed / sum(weights) if weights else None,
        least_share=min(shares, default=None),
        exit_status=status,
    )


def _first_after(client: StreamingAgent, began_at: float) -> tuple[StreamedTurn, StreamedTurn] | None:
    """Returns the first turn of a session that began after the drain, and the turn of the same session before it."""
    turns = [turn for turn in client.turns if turn.times]
    for before, after in pairwise(turns):
        if after.times[0] >= began_at and before.cache and after.cache:
            same = _prompt(after) > _prompt(before)  # a new session begins with a short prompt
            return (before, after) if same else None
    return None


def _history(turn: StreamedTurn) -> int:
    """The tokens of a session after this turn."""
    usage = turn.last["usage"]
    return int(usage["prompt_tokens"] + usage["completion_tokens"])


def _cached(turn: StreamedTurn) -> int:
    return sum(int(turn.cache[f"{tier}_tokens"]) for tier in _TIERS)


def _prompt(turn: StreamedTurn) -> int:
    return _cached(turn) + int(turn.cache["recomputed_tokens"])


def main() -> None:
    """Measures some drains, and prints or stores what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm-s", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="graftwork-drain-") as folder:
            runs.append(asyncio.run(measure(Path(folder), options.agents, options.warm_s)))
        print(json.dumps(asdict(runs[-1])), flush=True)
    shares = [run.cached_share for run in runs if run.cached_share is not None]
    body = {
        "machine": describe_machine(),
        "runs": [asdict(run) for run in runs],
        "failed": sum(run.failed for run in runs),
        "median_s": statistics.median(run.seconds for run in runs),
        "cached_share": statistics.median(shares) if shares else None,
    }
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
