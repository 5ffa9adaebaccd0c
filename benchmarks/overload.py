"""What a server does under five times its capacity for minutes, and how soon it is itself again afterwards.

    python benchmarks/overload.py [--seconds 600] [--factor 5] [--deadline-ms 4000] [--shared-cores] [--json OUT]

Starts a real `graftwork serve` with the demo model, and measures how many chats a second it answers. Then four tenants
send `--factor` times as many, Poisson, each chat with a deadline for its first token. Afterwards a light tenant sends
short chats one after another, until ten in a row are as fast as on the idle server.

    holds if: the server's processes are the same ones afterwards,
              every chat is answered to its end, or refused by 429, 503 or 504; no connection breaks,
              the p99 of refusals is below 20 ms, as the server sees it and as the client does,
              of the admitted (answered, or 504 because their deadline passed in the queue) 99 % had their first token in time,
              memory of all processes, but not the bounded caches of KV, is at most 1.1 x from the second quarter to the last,
              the light chats are fast again within 5 s.

"As the server sees it" is from a request's last byte to the head of the answer (timed_gateway.py). A refusal is the gateway's
own before the prompt is read, or, when the prompt is known, before the request is sent; or else it is the engine's. A chat that
waits in the queue and then makes room for another tenant's is refused late, and counts like any other.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from machine import describe_machine
from rich.console import Console
from server_processes import OWN_ROOT, Checkout, ServerProcess, free_port, make_tenant
from timed_gateway import read_times, timed_command

from graftwork.api.cli.bench.figures import percentile
from graftwork.api.cli.bench.load import ChatShape, Load, Sent, Target, arrivals
from graftwork.api.cli.bench.process_watch import process_use
from graftwork.api.cli.bench.runs import capacity
from graftwork.api.cli.bench.stream_client import tls_context
from graftwork.platform.clock import SystemClock
from graftwork.platform.cores import beside_engine_cores, last_core

_ADMIN_KEY = "gwa_benchmark_0123456789abcdef"
_CHAT = ChatShape(words=100, max_tokens=16)
"""A long prompt and a short answer: the engine is the bottleneck, and clients and gateway have cores to spare."""
_PROBE = ChatShape(words=4, max_tokens=2)
_TENANTS = 4
_OUTSTANDING = 32
_CAPACITY_S = 10.0
_DRAIN_S = 30.0
"""After the load ends, how long the admitted may take to end."""
_RECOVERED_CHATS = 10
_RECOVERY_LIMIT_S = 60.0
_IDLE_PROBES = 40
_READ_EVERY_S = 2.0
_REFUSED = (429, 503)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CACHES = re.compile(
    r'^graftwork_engine_memory_bytes\{memory="host",owner="(?:device_kv|host_kv)"\} (\S+)$', re.MULTILINE
)


@dataclass
class Server:
    """The server, its tenants, and what is read of its processes."""

    url: str
    process_id: int
    times: Path
    targets: list[Target]
    light: Target
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory of all processes without the caches of KV, at each reading."""
    gateway_mb: list[float] = field(default_factory=list)
    """Resident memory of the gateway's process alone, at the same times."""
    descriptors: list[int] = field(default_factory=list)

    async def watch(self) -> None:
        """Reads memory and descriptors again and again, until it is cancelled."""
        headers = {"authorization": f"Bearer {_ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, trust_env=False) as client:
            while True:
                text = (await client.get("/metrics")).raise_for_status().text
                use = process_use(self.process_id)
                assert use is not None, "the server has ended, or this is not Linux"
                caches = sum(float(one) for one in _CACHES.findall(text))
                self.memory_mb.append((use.rss_bytes - caches) / 1e6)
                self.gateway_mb.append(_PAGE_BYTES * _resident_pages(self.process_id) / 1e6)
                self.descriptors.append(use.descriptors)
                await asyncio.sleep(_READ_EVERY_S)


async def first_token_s(target: Target, number: int) -> float:
    """Sends one short chat on a new connection. Returns the seconds until its first token."""
    load = Load(SystemClock(), f"probe {number}")
    await load.open("light", target, _PROBE, [0.0])
    (one,) = load.sent
    return one.ttft_s if one.ttft_s is not None else float("inf")


async def recovery_s(target: Target, limit_s: float) -> float:
    """Returns the seconds until the first of ten chats in a row whose first tokens come within `limit_s`."""
    began, first_good, good = time.monotonic(), 0.0, 0
    number = 0
    while good < _RECOVERED_CHATS:
        sent_at = time.monotonic() - began
        if sent_at > _RECOVERY_LIMIT_S:
            return float("inf")
        is_good = await first_token_s(target, number) <= limit_s
        first_good = sent_at if is_good and not good else first_good
        good = good + 1 if is_good else 0
        number += 1
    return first_good


async def overload(server: Server, seconds: float, factor: float) -> dict[str, Any]:
    """Runs all phases, and returns the figures."""
    clock = SystemClock()
    tls_context()
    plain = replace(server.targets[0], deadline_ms=None)
    per_s = await capacity(plain, _OUTSTANDING, _CAPACITY_S, clock, lambda name, load: None, _CHAT)
    idle = [await first_token_s(server.light, -1 - number) for number in range(_IDLE_PROBES)]
    before, since = process_ids(server.process_id), len(read_times(server.times))
    load = Load(clock, "overload")
    watching = asyncio.create_task(server.watch())
    sending = [
        asyncio.create_task(
            load.open(f"tenant-{n}", target, _CHAT, arrivals(factor * per_s / _TENANTS, seconds, f"{n}"))
        )
        for n, target in enumerate(server.targets)
    ]
    await asyncio.sleep(seconds)
    recovered = await recovery_s(server.light, 2 * (percentile(idle, 0.99) or 0.0))
    _, late = await asyncio.wait(sending, timeout=_DRAIN_S)
    for task in (watching, *late):
        task.cancel()
    await asyncio.gather(watching, *sending, return_exceptions=True)
    answers = read_times(server.times)[since:]
    refused = [one for one in answers if one.status in _REFUSED]
    own = [one.started - one.arrived for one in refused]
    by_gateway = [one.started - one.arrived for one in refused if not one.submitted]
    with_prompt = [one.started - one.arrived for one in refused if one.submitted and not one.sent]
    by_engine = [one.started - one.arrived for one in refused if one.sent]
    in_gateway = [one.submitted - one.arrived for one in answers if one.submitted]
    in_engine = [one.started - one.sent for one in refused if one.sent]
    found = chats(load.sent, server.targets[0].deadline_ms or 0)
    return found | {
        "capacity_per_s": round(per_s, 1),
        "sent_per_s": round(len(load.sent) / seconds, 1),
        "same_processes": before == process_ids(server.process_id),
        "idle_first_token_ms": percentiles_ms(idle),
        "recovery_s": round(recovered, 2),
        "server_refusal_ms": percentiles_ms(own),
        "refused_by_gateway_ms": percentiles_ms(by_gateway),
        "refused_with_prompt_ms": percentiles_ms(with_prompt),
        "refused_by_engine_ms": percentiles_ms(by_engine),
        "until_submitted_ms": percentiles_ms(in_gateway),
        "from_sending_to_refusal_ms": percentiles_ms(in_engine),
        "longest_turn_ms": round(1000 * max((one.longest_turn for one in answers), default=0.0), 1),
        "memory_mb": [round(one, 1) for one in server.memory_mb],
        "gateway_mb": [round(one, 1) for one in server.gateway_mb],
        "descriptors": server.descriptors,
    }


def chats(sent: Sequence[Sent], deadline_ms: int) -> dict[str, Any]:
    """Returns what became of the chats, as their clients saw it."""
    refused = [one.ended_at - one.sent_at for one in sent if one.status in _REFUSED and one.ended_at is not None]
    answered = [one for one in sent if one.status == 200 and one.ended_at is not None and one.token_times]
    expired = sum(one.status == 504 for one in sent)
    in_time = sum(1000 * (one.ttft_s or 0.0) <= deadline_ms for one in answered)
    admitted = len(answered) + expired
    return {
        "statuses": dict(Counter(str(one.status) if one.ended_at is not None else "no end" for one in sent)),
        "broken": len(sent) - len(answered) - len(refused) - expired,
        "admitted": admitted,
        "in_time_share": round(in_time / admitted, 4) if admitted else 0.0,
        "first_token_ms": percentiles_ms([one.ttft_s for one in answered if one.ttft_s is not None]),
        "refusal_ms": percentiles_ms(refused),
    }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Returns the median, the 99th percentile and the largest of some times in milliseconds, and how many there are."""
    values = [percentile(seconds, share) for share in (0.5, 0.99, 1.0)]
    p50, p99, most = (None if value is None else round(1000 * value, 1) for value in values)
    return {"count": len(seconds), "p50": p50, "p99": p99, "max": most}


def _resident_pages(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1])


def process_ids(process_id: int) -> set[int]:
    """Returns the ids of a process and of its children: the engine among them."""
    folder = Path(f"/proc/{process_id}/task")
    children = " ".join((task / "children").read_text() for task in folder.iterdir()).split()
    return {process_id, *map(int, children)}


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Returns which of the promises at the top of this file hold."""
    memory = found["memory_mb"]
    quarter = max(len(memory) // 4, 1)
    early, late = percentile(memory[quarter : 2 * quarter], 0.5), percentile(memory[-quarter:], 0.5)
    return {
        "no_crash": found["same_processes"],
        "every_request_has_an_end": found["broken"] == 0,
        "refusals_client": (found["refusal_ms"]["p99"] or 0.0) < 20,
        "refusals_server": (found["server_refusal_ms"]["p99"] or 0.0) < 20,
        "admitted_in_time": found["in_time_share"] >= 0.99,
        "memory_flat": early is not None and late is not None and late <= 1.1 * early,
        "recovery": found["recovery_s"] <= 5.0,
    }


def run(seconds: float, factor: float, deadline_ms: int, *, pins: bool) -> dict[str, Any]:
    """Starts the server, runs the overload, and ends the server. With `pins`, the engine has a core of its own, where there
    are two, and the clients keep off it.
    """
    checkout, port = Checkout(OWN_ROOT), free_port()
    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as name:
        folder, url = Path(name), f"http://127.0.0.1:{port}"
        arguments = ["serve", "--demo", "--port", str(port), "--data-dir", name, "--device", "cpu"]
        command = timed_command(checkout, folder / "times", *arguments)
        environment = checkout.environment() | {"GRAFTWORK_ADMIN_KEY": _ADMIN_KEY, "GRAFTWORK_LOG_LEVEL": "warning"}
        core = last_core() if pins else None
        if core is not None:
            environment["GRAFTWORK_ENGINE_CORES"] = str(core)
        with ServerProcess(command, environment, folder / "log") as process:
            process.wait_for_http(f"{url}/readyz")
            keys = [make_tenant(url, _ADMIN_KEY) for _ in range(_TENANTS + 1)]
            *targets, light = (Target(url, key, "graftwork-demo", deadline_ms) for key in keys)
            server = Server(url, process.process_id, folder / "times", targets, replace(light, deadline_ms=None))
            with nullcontext() if core is None else beside_engine_cores([core]):
                found = asyncio.run(overload(server, seconds, factor))
            return found | {"holds": verdict(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the overload")
    parser.add_argument("--factor", type=float, default=5.0, help="arrivals, in capacities")
    parser.add_argument("--deadline-ms", type=int, default=4000, help="of each chat's first token")
    parser.add_argument("--shared-cores", action="store_true", help="leave the engine without a core of its own")
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    machine = describe_machine()
    found = run(options.seconds, options.factor, options.deadline_ms, pins=not options.shared_cores)
    report = {"machine": machine, "options": {**vars(options), "json": None}, "figures": found}
    Console().print_json(
        data={name: value for name, value in found.items() if name not in ("memory_mb", "gateway_mb", "descriptors")}
    )
    memory, gateway, descriptors = found["memory_mb"], found["gateway_mb"], found["descriptors"]
    for name, one in (("memory MB", memory), ("of the gateway", gateway)) if memory else ():
        Console().print(f"{name}: {one[0]:.0f} … {one[len(one) // 2]:.0f} … {one[-1]:.0f}", highlight=False)
    if memory:
        Console().print(f"descriptors: {descriptors[0]}, most {max(descriptors)}, {descriptors[-1]}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
