"""What one tenant's worst requests cost another tenant, and how much memory they leave behind.

    python benchmarks/under_attack.py [--checkout DIR ...] [--attacks chats,tokenizes,...] [--seconds 20] [--json OUT]

Starts a real `graftwork gateway` against a scripted engine in another process (`scripted_engine.py`). For each attack,
tenant A's processes repeat the attack's requests for `--seconds`, as many at once as the attack says. Meanwhile tenant
B sends one short streamed chat after another, and an operator asks for /healthz. The same is measured without an
attack first. Memory is that of the gateway's process, before the attacks and after each; its workers' peak stands beside it.

    holds if: B's p99 time to first token <= 2 x idle + 100 ms,  /healthz p99 < 50 ms,  memory within 10 %

An attack is a row of `ATTACKS`: add others there. On a machine with other work, run it with `chrt -f 5`.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, RunningGateway, Script, gateway_over_script, make_tenant

_LONG = 7_900_000
"""Bytes of a long body, just below the limit of a route."""
_SENTENCE = "The harbour master keeps a list of every boat that comes in before dawn. "
_PAUSE_S = 0.02
"""Between two requests of the victim, and two of the operator."""
_REST_S = 3.0
"""After an attack, before memory is read."""
_RECEIVED_BYTES = 1 << 16


def _long_text() -> str:
    return (_SENTENCE * (_LONG // len(_SENTENCE) + 1))[: _LONG - 1000]


def _chat(model: str, content: str) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def _values(model: str, one: bytes) -> bytes:
    start = b'{"model":"' + model.encode() + b'","messages":['
    return start + one * ((_LONG - len(start)) // len(one)) + one.rstrip(b",") + b"]}"


@dataclass(frozen=True, slots=True)
class Attack:
    """Requests that tenant A repeats."""

    path: str
    body: Callable[[str], bytes]
    """Makes the body for a model's name."""
    at_once: int = 8


ATTACKS = {
    "chats": Attack("/v1/chat/completions", lambda model: _chat(model, _long_text())),
    "control tokens": Attack("/v1/chat/completions", lambda model: _chat(model, "<|im_end|>" * (_LONG // 11))),
    "escapes": Attack("/v1/chat/completions", lambda model: _chat(model, "\n" * (_LONG // 2 - 500))),
    "one word": Attack("/v1/chat/completions", lambda model: _chat(model, "a" * (_LONG - 1000))),
    "messages": Attack(
        "/v1/messages",
        lambda model: json.dumps(
            {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": _long_text()}]}
        ).encode(),
    ),
    "tokenizes": Attack(
        "/v1/tokenize", lambda model: json.dumps({"model": model, "prompt": _long_text()}).encode(), at_once=3
    ),
    "empty lists": Attack("/v1/chat/completions", lambda model: _values(model, b"[],")),
    "numbers": Attack("/v1/chat/completions", lambda model: _values(model, b"1,")),
    "empty texts": Attack("/v1/chat/completions", lambda model: _values(model, b'"",')),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured during one attack; the first row of a checkout is the idle gateway."""

    checkout: str
    attack: str
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_max_ms: float
    num_chats: int
    health_p99_ms: float
    health_max_ms: float
    memory_peak_mb: float
    memory_after_mb: float
    workers_peak_mb: float
    """Of the gateway's worker processes together."""
    answers: dict[str, int]
    """How many of A's requests got which status."""


def attack(port: int, request: bytes, at_once: int, ends: Event, statuses: Any) -> None:
    """Repeats a request on `at_once` connections until `ends` is set. Runs in a process of its own."""
    import threading

    found: Counter[str] = Counter()

    def repeat() -> None:
        while not ends.is_set():
            found[_exchange(port, request)] += 1

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    ends.wait()
    for thread in threads:
        thread.join(timeout=20)
    statuses.put(dict(found))


def _exchange(port: int, request: bytes) -> str:
    """Sends a request and returns the status of its answer."""
    answer = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        while piece := connection.recv(_RECEIVED_BYTES):
            answer = answer or piece
    return answer[9:12].decode() or "none"


class Target:
    """A gateway with two tenants."""

    def __init__(self, checkout: Checkout, gateway: RunningGateway) -> None:
        self.checkout = checkout
        self.port = gateway.port
        self._process = psutil.Process(gateway.process_id)
        url, admin_key = gateway.url, gateway.admin_key
        self._attacker, self._victim = make_tenant(url, admin_key), make_tenant(url, admin_key)
        headers = {"authorization": f"Bearer {self._victim}"}
        models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).raise_for_status().json()
        self.model = models["data"][0]["id"]

    def memory_mb(self) -> float:
        """Resident memory of the gateway's process."""
        return float(self._process.memory_info().rss) / 1e6

    def workers_mb(self) -> float:
        """Resident memory of its worker processes."""
        total = 0
        for process in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def request(self, path: str, body: bytes, *, by_attacker: bool) -> bytes:
        """Returns the bytes of an HTTP request."""
        key = self._attacker if by_attacker else self._victim
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def first_token_s(self) -> float:
        """Sends one short streamed chat, and returns the seconds until its first text arrives."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        request = self.request("/v1/chat/completions", json.dumps(body | {"stream": True}).encode(), by_attacker=False)
        return await self._seconds_until(request, b'"content":"')

    async def health_s(self) -> float:
        """Returns the seconds that /healthz takes."""
        request = b"GET /healthz HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"
        return await self._seconds_until(request, b"\r\n\r\n")

    async def _seconds_until(self, request: bytes, sign: bytes) -> float:
        started_at = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer, seconds = b"", None
        while piece := await reader.read(_RECEIVED_BYTES):
            answer += piece
            if seconds is None and sign in answer.replace(b'"content":""', b""):
                seconds = time.perf_counter() - started_at
        writer.close()
        if seconds is None or b" 200 " not in answer[:20]:
            raise SystemExit(f"{self.checkout.name}: the victim was refused:\n{answer[:500]!r}")
        return seconds


async def measure(target: Target, name: str, seconds: float, statuses: Callable[[], dict[str, int]]) -> Row:
    """Measures the victim and the operator for some seconds. `statuses` ends the attack and returns its answers."""
    ends_at = time.monotonic() + seconds
    chats: list[float] = []
    health: list[float] = []
    memory: list[float] = []
    workers: list[float] = []

    async def repeat(send: Callable[[], Any], found: list[float]) -> None:
        while time.monotonic() < ends_at:
            found.append(await send())
            await asyncio.sleep(_PAUSE_S)

    async def watch_memory() -> None:
        while time.monotonic() < ends_at:
            memory.append(target.memory_mb())
            workers.append(target.workers_mb())
            await asyncio.sleep(0.1)

    await asyncio.gather(repeat(target.first_token_s, chats), repeat(target.health_s, health), watch_memory())
    answers = await asyncio.to_thread(statuses)
    await asyncio.sleep(_REST_S)
    milliseconds = [sorted(1000 * one for one in found) for found in (chats, health)]
    (p50, p99, most), (_, health_p99, health_most) = ((_at(a, 0.5), _at(a, 0.99), a[-1]) for a in milliseconds)
    after = target.memory_mb()
    return Row(
        checkout=target.checkout.name,
        attack=name,
        ttft_p50_ms=p50,
        ttft_p99_ms=p99,
        ttft_max_ms=most,
        num_chats=len(chats),
        health_p99_ms=health_p99,
        health_max_ms=health_most,
        memory_peak_mb=max(memory),
        memory_after_mb=after,
        workers_peak_mb=max(workers),
        answers=answers,
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def measure_attack(target: Target, name: str, seconds: float) -> Row:
    """Runs one attack, and measures meanwhile."""
    kind = ATTACKS[name]
    request = target.request(kind.path, kind.body(target.model), by_attacker=True)
    context = multiprocessing.get_context("spawn")
    ends, told = context.Event(), context.Queue()
    process = context.Process(target=attack, args=(target.port, request, kind.at_once, ends, told), daemon=True)
    process.start()
    time.sleep(2.0)

    def stop() -> dict[str, int]:
        ends.set()
        found: dict[str, int] = told.get()
        process.join()
        return found

    return asyncio.run(measure(target, name, seconds, stop))


def show(rows: Sequence[Row]) -> bool:
    """Prints the rows, and returns whether all limits hold."""
    table = Table("checkout", "attack", "TTFT ms p50", "p99", "max", "chats", "healthz p99", "max", "MB peak", "after")
    table.add_column("workers")
    table.add_column("answers")
    table.add_column("holds")
    idle, holds = rows[0], True
    for row in rows:
        if row.attack == "idle":
            idle = row
        good = row.ttft_p99_ms <= 2 * idle.ttft_p99_ms + 100 and row.health_p99_ms < 50
        good = good and row.memory_after_mb <= 1.1 * idle.memory_after_mb
        holds = holds and good
        times = (row.ttft_p50_ms, row.ttft_p99_ms, row.ttft_max_ms)
        rest = (row.health_p99_ms, row.health_max_ms, row.memory_peak_mb, row.memory_after_mb, row.workers_peak_mb)
        answers = " ".join(f"{status}:{count}" for status, count in row.answers.items())
        cells = [*(f"{one:.0f}" for one in times), str(row.num_chats), *(f"{one:.0f}" for one in rest)]
        table.add_row(row.checkout, row.attack, *cells, answers, "yes" if good else "NO")
    Console(width=150).print(table)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names of attacks, comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two steps of the engine")
    parser.add_argument("--json", type=Path, help="write every row here")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for root in arguments.checkout or [OWN_ROOT]:
        checkout = Checkout(root.absolute())
        with gateway_over_script(checkout, Script(1, arguments.step_ms)) as gateway:
            target = Target(checkout, gateway)
            asyncio.run(measure(target, "idle", 3.0, dict))  # imports and caches
            rows.append(asyncio.run(measure(target, "idle", arguments.seconds, dict)))
            names = arguments.attacks.split(",")
            rows += [measure_attack(target, attack_name, arguments.seconds) for attack_name in names]
    holds = show(rows)
    if arguments.json:
        record = {"machine": describe_machine(), "seconds": arguments.seconds, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
