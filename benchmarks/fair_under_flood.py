"""What a flood of one tenant does to another: time to first token, and how fast the flood's surplus is refused.

    python benchmarks/fair_under_flood.py [--checkout DIR ...] [--streams 200] [--seconds 20] [--json OUT]

Starts a real `graftwork serve` of each checkout with the demo model, and two tenants. The light tenant sends one short
streamed chat after another and measures the time to its first token; an operator asks for /healthz twenty times a second:

    idle      alone
    choices   the other tenant sends requests with n=64 of 400 tokens, one after another
    flood     the other tenant keeps `--streams` chats of 400 tokens going, with a queue of 64; a refused client
              sends again after one to three seconds

A refusal's latency is that of a 429 of the other tenant, from sending to its status. The clients share the machine's
cores with the server, so the latencies include waiting for a core. Beside them stands the server's own latency of a
refusal, which its process notes (`timed_gateway.py`): from the arrival of the request's last byte to the write of the
status; and the longest turns of its event loop, which are the most that a request waits before it arrives.

Memory is read before the first phase and after the last, on a server that is warm: it has seen a flood for
`--warm-seconds`. The engine's is shown by owner, as /metrics tells it; the owners add up to its process.

    holds if: the light tenant's p99 <= 2 x idle + 100 ms in both attacks, refusals p99 < 20 ms, /healthz p99 < 50 ms,
              the gateway's memory within 10 %, and the engine's without its bounded caches of KV within 10 %
"""

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx
import psutil  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from server_processes import OWN_ROOT, Checkout, ServerProcess, free_port, make_tenant
from timed_gateway import read_times, timed_command

_ADMIN_KEY = "gwa_benchmark_0123456789abcdef"
_LIGHT_TOKENS = 4
_FLOOD_TOKENS = 400
_CHOICES = 64
_WARM_UP_S = 4.0
_BACK_OFF_S = (1.0, 3.0)
"""The range of a refused client's pause. `retry-after` asks for one second at least."""
_HEALTH_PAUSE_S = 0.05
_REST_S = 5.0
"""After a flood, before memory is read."""
_OWNERS = re.compile(r'^graftwork_engine_memory_bytes\{memory="host",owner="(\w+)"\} (\S+)$', re.MULTILINE)
_CACHES = ("device_kv", "host_kv")
"""The owners that are bounded by a setting, and fill up to it."""
_MAX_WAITING = 64
"""Requests in the queue, so that the flood is larger than what the engine takes."""


@dataclass
class Figures:
    """What the two tenants saw in one phase, in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    light_statuses: Counter[int] = field(default_factory=Counter)
    refusals: list[float] = field(default_factory=list)
    flood_statuses: Counter[int] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "first_token_ms": _percentiles(self.first_tokens),
            "light_statuses": dict(self.light_statuses),
            "refusal_ms": _percentiles(self.refusals),
            "flood_statuses": dict(self.flood_statuses),
            "healthz_ms": _percentiles(self.health),
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Median and 99th percentile in milliseconds, and how many there are."""
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0, "p50": None, "p99": None}
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "count": len(ordered),
        "p50": round(1000 * statistics.median(ordered), 1),
        "p99": round(1000 * p99, 1),
    }


class Crowd(AbstractAsyncContextManager["Crowd"]):
    """The flooding tenant's clients, which send until the block ends."""

    def __init__(self, url: str, key: str, clients: int, body: dict[str, Any], figures: Figures) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits)
        self._body = body
        self._figures = figures
        self._clients = clients
        self._random = Random(0)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._send_for_ever()) for _ in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _send_for_ever(self) -> None:
        await asyncio.sleep(self._random.uniform(0, _WARM_UP_S) if self._clients > _CHOICES else 0)
        while True:
            started = time.monotonic()
            async with self._client.stream("POST", "/v1/chat/completions", json=self._body) as answer:
                self._figures.flood_statuses[answer.status_code] += 1
                if answer.status_code == 429:
                    self._figures.refusals.append(time.monotonic() - started)
                    await asyncio.sleep(self._random.uniform(*_BACK_OFF_S))
                async for _ in answer.aiter_raw():
                    pass


async def light_tenant(url: str, key: str, seconds: float, figures: Figures) -> None:
    """Sends short chats one after another, and notes the time to the first token of each."""
    headers = {"authorization": f"Bearer {key}"}
    ends_at = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        number = 0
        while time.monotonic() < ends_at:
            number += 1
            body = chat(f"Question {number}: where is my parcel?", _LIGHT_TOKENS)
            started = time.monotonic()
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                figures.light_statuses[answer.status_code] += 1
                is_waiting = answer.status_code == 200
                async for line in answer.aiter_lines():
                    if is_waiting and '"content":"' in line.replace('"content":""', ""):
                        figures.first_tokens.append(time.monotonic() - started)
                        is_waiting = False


async def operator(url: str, figures: Figures) -> None:
    """Asks for /healthz again and again, until it is cancelled."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        while True:
            started = time.monotonic()
            (await client.get("/healthz")).raise_for_status()
            figures.health.append(time.monotonic() - started)
            await asyncio.sleep(_HEALTH_PAUSE_S)


def chat(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": "graftwork-demo",
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        **fields,
    }


class Server(AbstractContextManager["Server"]):
    """A running `graftwork serve` with two tenants, and what its processes tell of themselves."""

    def __init__(self, checkout: Checkout, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._times = folder / "times"
        environment = checkout.environment() | {"GRAFTWORK_ADMIN_KEY": _ADMIN_KEY, "GRAFTWORK_LOG_LEVEL": "warning"}
        environment |= {"GRAFTWORK_MAX_WAITING": str(_MAX_WAITING)}
        arguments = ["serve", "--demo", "--port", str(port), "--data-dir", str(folder), "--device", "cpu"]
        command = timed_command(checkout, self._times, *arguments)
        self._process = ServerProcess(command, environment, folder / "log")

    def __enter__(self) -> Self:
        self._process.wait_for_http(f"{self.url}/readyz")
        self.light, self.flood = make_tenant(self.url, _ADMIN_KEY), make_tenant(self.url, _ADMIN_KEY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def num_answers(self) -> int:
        return len(read_times(self._times))

    def own_times(self, since: int) -> dict[str, Any]:
        """Returns the server's own latencies of refusals since an answer's number, and its longest turns of the loop."""
        answers = read_times(self._times)[since:]
        refusals = [one.started - one.arrived for one in answers if one.status == 429]
        longest = max((one.longest_turn for one in answers), default=0.0)
        return {"server_refusal_ms": _percentiles(refusals), "longest_turn_ms": round(1000 * longest, 1)}

    def memory_mb(self) -> dict[str, float]:
        """Returns the resident memory of the gateway's process, and the engine's by owner, in megabytes."""
        headers = {"authorization": f"Bearer {_ADMIN_KEY}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=30, trust_env=False).raise_for_status().text
        owners = {owner: float(value) / 1e6 for owner, value in _OWNERS.findall(text)}
        gateway = psutil.Process(self._process.process_id).memory_info().rss / 1e6
        memory = {"gateway": gateway, "engine": sum(owners.values())} | {f"engine {one}": owners[one] for one in owners}
        return {name: round(value, 1) for name, value in memory.items()}


async def measure(server: Server, streams: int, seconds: float, warm_seconds: float) -> dict[str, Any]:
    """Returns the figures of all phases by name, and the memory before and after them."""
    story = chat("Tell me a long story.", _FLOOD_TOKENS)
    crowds: dict[str, tuple[int, dict[str, Any]]] = {
        "idle": (0, {}),
        "choices": (2, story | {"n": _CHOICES}),
        "flood": (streams, story),
    }
    async with Crowd(server.url, server.flood, streams, story, Figures()):
        await light_tenant(server.url, server.light, warm_seconds, Figures())
    await asyncio.sleep(_REST_S)
    found: dict[str, Any] = {"memory_before_mb": server.memory_mb()}
    for name, (clients, body) in crowds.items():
        figures, since = Figures(), server.num_answers()
        async with Crowd(server.url, server.flood, clients, body, figures):
            await asyncio.sleep(_WARM_UP_S if clients else 0)
            asking = asyncio.create_task(operator(server.url, figures))
            await light_tenant(server.url, server.light, seconds, figures)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        found[name] = figures.summary() | server.own_times(since)
    await asyncio.sleep(_REST_S)
    return found | {"memory_after_mb": server.memory_mb()}


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Returns which of the promises at the top of this file hold."""
    before, after = found["memory_before_mb"], found["memory_after_mb"]
    limit = 2 * found["idle"]["first_token_ms"]["p99"] + 100
    attacks = [found["choices"], found["flood"]]

    def own(memory: dict[str, float]) -> float:
        return memory["engine"] - sum(memory.get(f"engine {cache}", 0.0) for cache in _CACHES)

    return {
        "first_token": all(one["first_token_ms"]["p99"] <= limit for one in attacks),
        "refusals": all((one["refusal_ms"]["p99"] or 0) < 20 for one in attacks),
        "healthz": all(one["healthz_ms"]["p99"] < 50 for one in attacks),
        "gateway_memory": after["gateway"] <= 1.1 * before["gateway"],
        "engine_memory": after["engine"] <= 1.1 * before["engine"],
        "engine_memory_without_caches": own(after) <= 1.1 * own(before),
    }


def run(checkout: Checkout, streams: int, seconds: float, warm_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Server(checkout, Path(folder)) as server:
        found = asyncio.run(measure(server, streams, seconds, warm_seconds))
        return found | {"holds": verdict(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, action="append", help="default: this one")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--warm-seconds", type=float, default=15.0, help="of a flood before the first phase")
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    figures = {}
    for root in options.checkout or [OWN_ROOT]:
        checkout = Checkout(root.resolve())
        figures[checkout.name] = run(checkout, options.streams, options.seconds, options.warm_seconds)
    report = {
        "machine": machine,
        "note": options.note,
        "streams": options.streams,
        "seconds": options.seconds,
        "checkouts": figures,
    }
    Console().print_json(data=report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
