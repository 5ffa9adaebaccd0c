"""What watchers of the live overview cost a gateway: the share of one core, of its whole process.

    python benchmarks/watchers.py [--watchers 100] [--seconds 20] [--tenants 200] [--rounds 3]
        [--kinds poll,stream] [--json OUT]

Starts a real `graftwork gateway` over a scripted engine, with tenants of which each has sent a request. Then reads the
gateway's CPU time over spans of `--seconds` with no watcher and with `--watchers` of each kind, which take turns in each round. A
watcher of the kind `poll` asks `GET /v1/admin/overview` once a second on a connection of its own, with the ETag of its
last answer; one of the kind `stream` reads the snapshots of one stream. While they watch, one request a second of a random tenant changes the snapshot, so that most answers have a body.

    cost = (CPU a second with watchers) - (CPU a second without)

Watchers are plain sockets in this process.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from gateway_cpu import process_clock
from machine import describe_machine
from server_processes import OWN_ROOT, Checkout, RunningGateway, Script, gateway_over_script, make_tenant


@dataclass(frozen=True, slots=True)
class Sample:
    """One span with so many watchers."""

    kind: str
    """`none`, `poll` or `stream`."""
    watchers: int
    core_share: float
    """CPU seconds of the gateway a second, user and system."""
    answers_a_second: float
    unchanged_share: float
    """The part of the answers that were a 304."""
    body_bytes: int
    """Of the latest answer with a body."""


@dataclass(slots=True)
class _Seen:
    answers: int = 0
    unchanged: int = 0
    body_bytes: int = 0


class Watched:
    """A gateway with tenants."""

    def __init__(self, running: RunningGateway, tenants: int) -> None:
        self._running = running
        self._clock = process_clock(running.process_id)
        self._keys = [make_tenant(running.url, running.admin_key) for _ in range(tenants)]
        self._noise = random.Random(1)
        headers = {"authorization": f"Bearer {self._keys[0]}"}
        models = httpx.get(f"{running.url}/v1/models", headers=headers, trust_env=False).raise_for_status().json()
        self._model = models["data"][0]["id"]

    async def warm(self) -> None:
        """Sends one request of each tenant."""
        async with httpx.AsyncClient(base_url=self._running.url, timeout=60, trust_env=False) as client:
            for key in self._keys:
                await self._chat(client, key)

    async def span(self, kind: str, watchers: int, seconds: float) -> Sample:
        """Measures one span."""
        seen, end = _Seen(), asyncio.Event()
        watch = self._follow if kind == "stream" else self._poll
        tasks = [asyncio.create_task(watch(seen, end, number / max(watchers, 1))) for number in range(watchers)]
        async with httpx.AsyncClient(base_url=self._running.url, timeout=60, trust_env=False) as client:
            await asyncio.sleep(1.5)  # connections are open
            seen.answers = seen.unchanged = 0
            began_at, began_s = time.monotonic(), time.clock_gettime(self._clock)
            await self.keep_busy(client, seconds)
            took = time.monotonic() - began_at
            used = time.clock_gettime(self._clock) - began_s
        end.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Sample(
            kind, watchers, used / took, seen.answers / took, seen.unchanged / max(seen.answers, 1), seen.body_bytes
        )

    async def keep_busy(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Sends one request a second, of random tenants, for so many seconds."""
        end_at = time.monotonic() + seconds
        while (left := end_at - time.monotonic()) > 0:
            await self._chat(client, self._noise.choice(self._keys))
            await asyncio.sleep(min(1.0, left))

    async def _chat(self, client: httpx.AsyncClient, key: str) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        answer.raise_for_status()

    async def _follow(self, seen: _Seen, end: asyncio.Event, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._running.port, limit=1 << 22)
        head = "GET /v1/admin/overview?stream=true HTTP/1.1\r\nhost: bench\r\n"
        writer.write(f"{head}authorization: Bearer {self._running.admin_key}\r\n\r\n".encode())
        while not end.is_set():
            event = await reader.readuntil(b"\n\n")
            seen.answers += 1
            seen.body_bytes = len(event)

    async def _poll(self, seen: _Seen, end: asyncio.Event, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._running.port, limit=1 << 22)
        head = f"GET /v1/admin/overview HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._running.admin_key}\r\n"
        head += "accept-encoding: gzip\r\n"  # as browsers and the SDK ask
        etag, due = "", time.monotonic()
        while not end.is_set():
            condition = f"if-none-match: {etag}\r\n" if etag else ""
            writer.write(f"{head}{condition}\r\n".encode())
            status, headers, body = await _answer(reader)
            etag = headers.get("etag", "")
            seen.answers += 1
            seen.unchanged += status == 304
            seen.body_bytes = len(body) or seen.body_bytes
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body


async def measure(running: RunningGateway, arguments: argparse.Namespace) -> list[Sample]:
    """All samples."""
    watched = Watched(running, arguments.tenants)
    await watched.warm()
    samples = []
    for number in range(arguments.rounds):
        kinds = ["none", *arguments.kinds.split(",")]
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            watchers = 0 if kind == "none" else arguments.watchers
            samples.append(await watched.span(kind, watchers, arguments.seconds))
            print(samples[-1])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="poll,stream")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = describe_machine()
    with gateway_over_script(Checkout(OWN_ROOT), Script(1, 5.0)) as running:
        samples = asyncio.run(measure(running, arguments))
    median = {
        kind: statistics.median(one.core_share for one in samples if one.kind == kind)
        for kind in dict.fromkeys(one.kind for one in samples)
    }
    cost = {kind: share - median["none"] for kind, share in median.items() if kind != "none"}
    for kind, share in cost.items():
        print(
            f"{arguments.watchers} watchers by {kind} cost {share:.2%} of a core (median of {arguments.rounds} rounds)"
        )
    if arguments.json:
        report = {
            "benchmark": "watchers",
            "machine": machine,
            "tenants": arguments.tenants,
            "seconds": arguments.seconds,
            "watchers": arguments.watchers,
            "core_share_by_kind": median,
            "cost_by_kind": cost,
            "samples": [{name: getattr(one, name) for name in Sample.__slots__} for one in samples],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
