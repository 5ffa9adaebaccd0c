"""What `graftwork top` costs the machine that it runs on: the share of one core, in a terminal of 80 by 24.

    python benchmarks/top_cpu.py [--seconds 30] [--tenants 200] [--json OUT]

Starts a real gateway over a scripted engine, with tenants of which one sends a request each second, so that each snapshot
differs. Runs `graftwork top` in a pseudo-terminal whose output is read and dropped, and reads its CPU time, user and
system, over `--seconds` after its start has settled.
"""

import argparse
import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path

import httpx
from gateway_cpu import process_clock
from machine import describe_machine
from server_processes import OWN_ROOT, Checkout, RunningGateway, Script, gateway_over_script
from watchers import Watched

_SETTLE_S = 5.0


def start_top(running: RunningGateway) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Starts the program in a terminal of its own. Returns it, and a list whose item is the bytes that it has drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = Checkout(OWN_ROOT).environment() | {
        "GRAFTWORK_URL": running.url,
        "GRAFTWORK_ADMIN_KEY": running.admin_key,
        "TERM": "xterm-256color",
    }
    command = Checkout(OWN_ROOT).command("top")
    program = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    drawn = [0]

    def drain() -> None:
        while True:
            try:
                drawn[0] += len(os.read(ours, 1 << 16))
            except OSError:
                return

    threading.Thread(target=drain, daemon=True).start()
    return program, drawn


async def measure(running: RunningGateway, arguments: argparse.Namespace) -> dict[str, float]:
    """CPU seconds a second, and the bytes drawn a second."""
    watched = Watched(running, arguments.tenants)
    await watched.warm()
    program, drawn = start_top(running)
    try:
        async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
            await watched.keep_busy(client, _SETTLE_S)
            clock = process_clock(program.pid)
            began_at, began_s, before = time.monotonic(), time.clock_gettime(clock), drawn[0]
            await watched.keep_busy(client, arguments.seconds)
            took = time.monotonic() - began_at
            return {
                "core_share": (time.clock_gettime(clock) - began_s) / took,
                "drawn_bytes_a_second": (drawn[0] - before) / took,
            }
    finally:
        program.terminate()
        program.wait(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = describe_machine()
    with gateway_over_script(Checkout(OWN_ROOT), Script(1, 5.0)) as running:
        found = asyncio.run(measure(running, arguments))
    print(
        f"graftwork top at 80x24 uses {found['core_share']:.2%} of a core, {found['drawn_bytes_a_second']:.0f} bytes/s"
    )
    if arguments.json:
        report = {"benchmark": "top_cpu", "machine": machine, "tenants": arguments.tenants, **found}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
