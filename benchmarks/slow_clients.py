"""What clients that misuse their connections cost another tenant's streams, and what they leave behind.

    python benchmarks/slow_clients.py [--attacks connections,cancels,...] [--seconds 20] [--json OUT]

Starts a real `graftwork gateway` against a scripted engine in another process (`scripted_engine.py`). In each attack a
process of tenant A does one thing for `--seconds`, while tenant B reads four streams, one after another in each of four
connections, and notes the time between two pieces of each stream. The same is measured without an attack first, and
again after the attacks.

    connections     10,000 open connections that send nothing, opened again when the gateway closes them
    never read      64 streams whose clients never read
    one byte        64 streams whose clients read a byte a second
    endless head    200 requests that send a header every tenth of a second, for ever
    cancels         1,000 streams a second that are sent and closed at once

    holds if: B's p99 inter-token time <= 1.3 x idle in each attack, and of B's streams none is cut or refused;
              after all attacks memory is within 10 % of before, and descriptors are what they were, within 10

On a machine with other work, run it with `chrt -f 5`. Needs `ulimit -n` of 12,000.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, Script, gateway_over_script
from under_attack import Target

_STREAMS = 4
_STREAM_TOKENS = 200
_LONG_TOKENS = 1500
_CONNECTIONS = 10_000
_OPENED_AT_ONCE = 200
_DESCRIPTORS = 12_000
_CANCELS_PER_S = 1000
_SETTLE_S = 5.0
_RETURN_WITHIN_S = 90.0
"""Connections that the kernel still holds for a client that is gone are closed by the gateway's own limits by then."""
_RECEIVED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """What the victim saw in one phase, in milliseconds, and what the gateway had at its end."""

    attack: str
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    gaps: int
    cut: int
    """Streams that were refused, or broke off."""
    memory_mb: float
    descriptors_peak: int
    descriptors: int
    done: dict[str, int]
    """What the attacker did."""


# ---- the attacks: each runs in a process of its own ------------------------------------------------------------------


async def _open(port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
    return one


async def connections(port: int, request: bytes, counts: dict[str, int]) -> None:
    """Holds idle connections open, and opens those again that were closed."""
    held: list[socket.socket] = []
    while True:
        missing = _CONNECTIONS - len(held)
        for start in range(0, missing, _OPENED_AT_ONCE):
            number = min(_OPENED_AT_ONCE, missing - start)
            opened = await asyncio.gather(*(_open(port) for _ in range(number)), return_exceptions=True)
            held += [one for one in opened if isinstance(one, socket.socket)]
            counts["failed"] = counts.get("failed", 0) + sum(isinstance(one, BaseException) for one in opened)
        counts["opened"] = counts.get("opened", 0) + missing
        counts["held"] = max(counts.get("held", 0), len(held))
        await asyncio.sleep(0.5)
        alive = [one for one in held if _is_open(one)]
        for one in set(held) - set(alive):
            one.close()
        held = alive


def _is_open(one: socket.socket) -> bool:
    try:
        return one.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


async def never_read(port: int, request: bytes, counts: dict[str, int]) -> None:
    await asyncio.gather(*(_unread(port, request, counts) for _ in range(64)))


async def _send_with_small_buffer(one: socket.socket, port: int, request: bytes, counts: dict[str, int]) -> None:
    """Sends a request on a new socket that keeps little of the answer."""
    loop = asyncio.get_running_loop()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    await loop.sock_connect(one, ("127.0.0.1", port))
    await loop.sock_sendall(one, request)
    counts["streams"] = counts.get("streams", 0) + 1


async def _unread(port: int, request: bytes, counts: dict[str, int]) -> None:
    while True:
        with suppress(OSError), socket.socket() as one:
            await _send_with_small_buffer(one, port, request, counts)
            await asyncio.sleep(3600)


async def one_byte(port: int, request: bytes, counts: dict[str, int]) -> None:
    await asyncio.gather(*(_slow(port, request, counts) for _ in range(64)))


async def _slow(port: int, request: bytes, counts: dict[str, int]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with suppress(OSError), socket.socket() as one:
            await _send_with_small_buffer(one, port, request, counts)
            is_open = True
            while is_open:
                is_open = bool(await loop.sock_recv(one, 1))
                await asyncio.sleep(1)


async def endless_head(port: int, request: bytes, counts: dict[str, int]) -> None:
    await asyncio.gather(*(_heads(port, counts) for _ in range(200)))


async def _heads(port: int, counts: dict[str, int]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with suppress(OSError):
            one = await _open(port)
            counts["heads"] = counts.get("heads", 0) + 1
            with one:
                await loop.sock_sendall(one, b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n")
                number = 0
                while True:
                    await loop.sock_sendall(one, f"x-{number}: {'a' * 20}\r\n".encode())
                    number += 1
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)


async def cancels(port: int, request: bytes, counts: dict[str, int]) -> None:
    """Sends a stream's request and closes the connection a few milliseconds later, a thousand times a second."""
    noise, began, number = random.Random(0), time.monotonic(), 0

    async def one() -> None:
        with suppress(OSError), await _open(port) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, request)
            await asyncio.sleep(noise.uniform(0, 0.02))
            counts["cancelled"] = counts.get("cancelled", 0) + 1

    async with asyncio.TaskGroup() as group:
        while True:
            due = int((time.monotonic() - began) * _CANCELS_PER_S)
            for _ in range(due - number):
                group.create_task(one())
            number = due
            await asyncio.sleep(0.005)


Act = Callable[[int, bytes, dict[str, int]], Awaitable[None]]
ATTACKS: dict[str, Act] = {
    "connections": connections,
    "never read": never_read,
    "one byte": one_byte,
    "endless head": endless_head,
    "cancels": cancels,
}


def attack(name: str, port: int, request: bytes, started: Event, ends: Event, told: Any) -> None:
    """Runs one attack until `ends` is set. Its connections close with its process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    counts: dict[str, int] = {}

    async def run() -> None:
        acting = asyncio.ensure_future(ATTACKS[name](port, request, counts))
        started.set()
        await asyncio.to_thread(ends.wait)
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)

    asyncio.run(run())
    told.put(counts)


# ---- the victim ------------------------------------------------------------------------------------------------------


async def victim(target: Target, seconds: float, gaps: list[float]) -> int:
    """Reads one stream after another. Appends the seconds between pieces of a stream; returns how many were cut."""
    ends_at, cut = time.monotonic() + seconds, 0
    body = {"model": target.model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body |= {"max_tokens": _STREAM_TOKENS, "ignore_eos": True}
    request = target.request("/v1/chat/completions", json.dumps(body).encode(), by_attacker=False)
    while time.monotonic() < ends_at:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(request)
        last, is_whole = 0.0, False
        while piece := await reader.read(_RECEIVED_BYTES):
            now = time.perf_counter()
            if b'"content":"' in piece:
                gaps += [now - last] if last else []
                last = now
            is_whole = is_whole or b"[DONE]" in piece
        writer.close()
        cut += not is_whole
    return cut


async def measure(target: Target, process: psutil.Process, name: str, seconds: float) -> Row:
    """Measures the victim for some seconds."""
    gaps: list[float] = []
    most = process.num_fds()

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.num_fds())
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    cut = sum(await asyncio.gather(*(victim(target, seconds, gaps) for _ in range(_STREAMS))))
    watching.cancel()
    ordered = sorted(1000 * gap for gap in gaps)

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)

    memory = process.memory_info().rss / 1e6
    return Row(name, at(0.5), at(0.99), at(1.0), len(ordered), cut, round(memory, 1), most, process.num_fds(), {})


def measure_attack(target: Target, process: psutil.Process, name: str, seconds: float) -> Row:
    """Runs one attack, and measures the victim meanwhile."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body |= {"max_tokens": _LONG_TOKENS, "ignore_eos": True}
    request = target.request("/v1/chat/completions", json.dumps(body).encode(), by_attacker=True)
    context = multiprocessing.get_context("spawn")
    started, ends, told = context.Event(), context.Event(), context.Queue()
    attacker = context.Process(target=attack, args=(name, target.port, request, started, ends, told), daemon=True)
    attacker.start()
    started.wait()
    row = asyncio.run(measure(target, process, name, seconds))
    ends.set()
    done = told.get()
    attacker.join()
    time.sleep(_SETTLE_S)
    return Row(**{**asdict(row), "done": done})


def wait_for_descriptors(process: psutil.Process, most: int) -> float:
    """Waits until the gateway has at most so many descriptors. Returns the seconds that this took."""
    began = time.monotonic()
    while process.num_fds() > most and time.monotonic() - began < _RETURN_WITHIN_S:
        time.sleep(0.5)
    return round(time.monotonic() - began, 1)


def verdict(rows: Sequence[Row]) -> dict[str, bool]:
    """Returns which of the promises at the top of this file hold. The first and the last row are without an attack."""
    idle, after = rows[0], rows[-1]
    return {
        **{f"itl beside {row.attack}": row.itl_p99_ms <= 1.3 * idle.itl_p99_ms for row in rows[1:-1]},
        "no stream is cut": not any(row.cut for row in rows),
        "memory": after.memory_mb <= 1.1 * idle.memory_mb,
        "descriptors": after.descriptors <= idle.descriptors + 10,
    }


def show(rows: Sequence[Row]) -> None:
    columns = ("attack", "ITL ms p50", "p99", "max", "gaps", "cut", "MB", "descriptors most", "at the end", "attacker")
    table = Table(*columns)
    for row in rows:
        *figures, done = list(asdict(row).values())[1:]
        table.add_row(row.attack, *map(str, figures), " ".join(f"{what}:{count}" for what, count in done.items()))
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names of attacks, comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--step-ms", type=float, default=20.0, help="between two steps of the engine")
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path, help="write every row here")
    options = parser.parse_args()
    checkout = Checkout(OWN_ROOT)
    with gateway_over_script(checkout, Script(1, options.step_ms)) as gateway:
        target, process = Target(checkout, gateway), psutil.Process(gateway.process_id)
        asyncio.run(measure(target, process, "warm", 3.0))
        rows = [asyncio.run(measure(target, process, "idle", options.seconds))]
        rows += [measure_attack(target, process, name, options.seconds) for name in options.attacks.split(",")]
        returned_s = wait_for_descriptors(process, rows[0].descriptors + 10)
        rows.append(asyncio.run(measure(target, process, "afterwards", options.seconds)))
    show(rows)
    holds = verdict(rows)
    Console().print_json(data={"descriptors_returned_after_s": returned_s, "holds": holds})
    if options.json:
        record = {"machine": describe_machine(), "note": options.note, "seconds": options.seconds}
        record |= {"rows": [asdict(row) for row in rows], "descriptors_returned_after_s": returned_s, "holds": holds}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
