"""The gateway's share of the time to the first token, on an idle server.

    python benchmarks/first_token.py [--checkout DIR ...] [--database NAME ...] [--requests 300] [--json OUT]

Starts a real `graftwork serve` of each checkout on each database (sqlite, postgres) with the demo model, and sends one
short streamed chat after another on one connection. The gateway's process notes the times of each chat itself (`timed_gateway.py`), so neither the client
nor the wait of the client for a core is in them:

    before   from the arrival of the request's last byte to the request's submission to the engine
    engine   from there to the first token out of the engine: the wire between them, the prefill and the first step
    after    from there to the write of the first text to the client's socket
    share    before + after
    healthz  the floor: from the arrival of a GET /healthz to the write of its answer, in the same process

    holds if: share p50 < 5 ms

PostgreSQL needs a server on which databases may be made. Servers take turns, request by request. On a machine with other
work, run it with `chrt -f 5`; PostgreSQL itself then still waits for the other work.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import httpx
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, ServerProcess, free_port, make_tenant
from timed_gateway import TimedAnswer, percentile_ms, read_times, timed_command
from turn_transactions import DEFAULT_POSTGRES, fresh_postgres

_ADMIN_KEY = "gwa_benchmark_0123456789abcdef"
_PATHS = ("/v1/chat/completions", "/healthz")
_WARM_UP = 20
_LIMIT_MS = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Percentiles of one part of the time, in milliseconds."""

    checkout: str
    database: str
    part: str
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class Target:
    """One server under measurement."""

    def __init__(self, checkout: Checkout, database: str, folder: Path, stack: ExitStack) -> None:
        """`database` is the address of an empty PostgreSQL database, or empty for a SQLite file in `folder`."""
        self.checkout = checkout
        self.database = "postgres" if database else "sqlite"
        self._times = folder / "times"
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        environment = checkout.environment() | {"GRAFTWORK_ADMIN_KEY": _ADMIN_KEY, "GRAFTWORK_LOG_LEVEL": "warning"}
        arguments = ["serve", "--demo", "--port", str(port), "--data-dir", str(folder), "--device", "cpu"]
        arguments += ["--database-url", database] if database else []
        command = timed_command(checkout, self._times, *arguments)
        server = stack.enter_context(ServerProcess(command, environment, folder / "log"))
        server.wait_for_http(f"{url}/readyz")
        headers = {"authorization": f"Bearer {make_tenant(url, _ADMIN_KEY)}"}
        self._client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False))

    def ask(self, number: int) -> None:
        """Sends one short chat, and one GET /healthz."""
        messages = [{"role": "user", "content": f"Question {number}: where is my parcel?"}]
        body = {"model": "graftwork-demo", "messages": messages, "max_tokens": 4, "stream": True, "ignore_eos": True}
        self._client.post("/v1/chat/completions", json=body).raise_for_status()
        self._client.get("/healthz").raise_for_status()

    def answers(self) -> list[TimedAnswer]:
        """Returns what the gateway noted since the start, without the warm-up."""
        found = [one for one in read_times(self._times) if one.path in _PATHS]
        return found[2 * _WARM_UP :]


def figures(target: Target) -> list[Figures]:
    """Returns the percentiles of each part, in the order of the module's description."""
    answers = target.answers()
    chats = [one for one in answers if one.submitted and one.engine_text and one.first_text]
    assert chats, "no chat was timed from its arrival to its first text: timed_gateway.py must follow the gateway"
    parts = {
        "before": [one.submitted - one.arrived for one in chats],
        "engine": [one.engine_text - one.submitted for one in chats],
        "after": [one.first_text - one.engine_text for one in chats],
        "share": [one.submitted - one.arrived + one.first_text - one.engine_text for one in chats],
        "healthz": [one.started - one.arrived for one in answers if one.path == "/healthz"],
    }
    names = target.checkout.name, target.database
    return [
        Figures(*names, name, len(seconds), *(percentile_ms(seconds, share) for share in (0.5, 0.9, 0.99)))
        for name, seconds in parts.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--database", action="append", choices=("sqlite", "postgres"), help="may be repeated")
    parser.add_argument("--postgres-url", default=os.environ.get("GRAFTWORK_TEST_POSTGRES_URL", DEFAULT_POSTGRES))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = describe_machine()
    with ExitStack() as stack:
        targets = []
        for root, database in product(arguments.checkout or [OWN_ROOT], arguments.database or ["sqlite"]):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-bench-")))
            url = stack.enter_context(fresh_postgres(arguments.postgres_url)) if database == "postgres" else ""
            if url is None:
                parser.error(f"no databases can be made at {arguments.postgres_url}: start PostgreSQL, or correct it")
            targets.append(Target(Checkout(root.absolute()), url, folder, stack))
        for number in range(_WARM_UP + arguments.requests):
            for target in targets:
                target.ask(number)
        rows = [row for target in targets for row in figures(target)]
    table = Table("checkout", "database", "part", "requests", "ms p50", "p90", "p99")
    for row in rows:
        times = (f"{one:.2f}" for one in (row.p50_ms, row.p90_ms, row.p99_ms))
        table.add_row(row.checkout, row.database, row.part, str(row.count), *times)
    Console(width=100).print(table)
    if arguments.json is not None:
        record = {"machine": machine, "note": arguments.note, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row.p50_ms < _LIMIT_MS for row in rows if row.part == "share") else 1


if __name__ == "__main__":
    sys.exit(main())
