"""What a flood of one tenant does to another: time to first token, and how fast the flood's surplus is refused.

    python benchmarks/fair_under_flood.py [--checkout DIR ...] [--streams 200] [--seconds 20] [--json OUT]

Starts a real `graftwork serve` of each checkout with the demo model, and two tenants. The light tenant sends one short
streamed chat after another and measures the time to its first token:

    idle      alone
    choices   the other tenant sends requests with n=64 of 400 tokens, one after another
    flood     the other tenant keeps `--streams` chats of 400 tokens going, with a queue of 64; a refused client
              sends again after one to three seconds

A refusal's latency is that of a 429 of the other tenant, from sending to its status. The clients share the machine's
cores with the server, so the latencies include waiting for a core.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx
from machine import describe_machine
from rich.console import Console
from server_processes import OWN_ROOT, Checkout, ServerProcess, free_port, make_tenant

_ADMIN_KEY = "gwa_benchmark_0123456789abcdef"
_LIGHT_TOKENS = 4
_FLOOD_TOKENS = 400
_CHOICES = 64
_WARM_UP_S = 4.0
_BACK_OFF_S = (1.0, 3.0)
"""The range of a refused client's pause. `retry-after` asks for one second at least."""
_MAX_WAITING = 64
"""Requests in the queue, so that the flood is larger than what the engine takes."""


@dataclass
class Figures:
    """What the two tenants saw in one phase, in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    light_statuses: Counter[int] = field(default_factory=Counter)
    refusals: list[float] = field(default_factory=list)
    flood_statuses: Counter[int] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        return {
            "first_token_ms": _percentiles(self.first_tokens),
            "light_statuses": dict(self.light_statuses),
            "refusal_ms": _percentiles(self.refusals),
            "flood_statuses": dict(self.flood_statuses),
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


async def measure(url: str, light: str, flood: str, streams: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of all phases by name."""
    found: dict[str, Any] = {}
    crowds: dict[str, tuple[int, dict[str, Any]]] = {
        "idle": (0, {}),
        "choices": (2, chat("Tell me a long story.", _FLOOD_TOKENS, n=_CHOICES)),
        "flood": (streams, chat("Tell me a long story.", _FLOOD_TOKENS)),
    }
    for name, (clients, body) in crowds.items():
        figures = Figures()
        async with Crowd(url, flood, clients, body, figures):
            await asyncio.sleep(_WARM_UP_S if clients else 0)
            await light_tenant(url, light, seconds, figures)
        found[name] = figures.summary()
    return found


def run(checkout: Checkout, streams: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        environment = checkout.environment() | {"GRAFTWORK_ADMIN_KEY": _ADMIN_KEY, "GRAFTWORK_LOG_LEVEL": "warning"}
        environment |= {"GRAFTWORK_MAX_WAITING": str(_MAX_WAITING)}
        command = checkout.command("serve", "--demo", "--port", str(port), "--data-dir", folder, "--device", "cpu")
        with ServerProcess(command, environment, Path(folder) / "log") as server:
            server.wait_for_http(f"{url}/readyz")
            light, flood = make_tenant(url, _ADMIN_KEY), make_tenant(url, _ADMIN_KEY)
            return asyncio.run(measure(url, light, flood, streams, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, action="append", help="default: this one")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    figures = {}
    for root in options.checkout or [OWN_ROOT]:
        checkout = Checkout(root.resolve())
        figures[checkout.name] = run(checkout, options.streams, options.seconds)
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
