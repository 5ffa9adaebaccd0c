"""How many database transactions a session turn of 200 tokens makes, on SQLite and on PostgreSQL.

    python benchmarks/turn_transactions.py [--checkout DIR] [--turns 1,32] [--step-ms 2,25] [--rounds 5] [--json OUT]
        [--answers streamed,whole]

A gateway under `traced_process.py` answers turns of new sessions, one alone or several at once, from a scripted engine
that answers a token a step. A streamed answer has a reader of its events; a whole one has none. Counted are the BEGINs
and COMMITs that SQLAlchemy's engine events tell, from the requests to 0.3 s after their answers' ends, divided by the
turns. Reads end without a COMMIT, so `begin` is the number to go by. `s` tells whether the gateway kept up with the
engine.
PostgreSQL needs a server on which databases may be made; without one only SQLite is measured.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import httpx
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, make_tenant
from traced_process import Recording
from traced_server import traced_gateway

_TOKENS = 200
DEFAULT_POSTGRES = "postgresql://postgres@127.0.0.1:5432/postgres"
_SAMPLING = {"max_tokens": _TOKENS, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Scene:
    """What is measured."""

    database: str
    turns: int
    """At once."""
    step_ms: float
    answer: str
    """`streamed` or `whole`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round, per turn."""

    scene: Scene
    begin: float
    commit: float
    text_deltas: float
    """Events of text that the reader saw."""
    seconds: float
    """From the first request to the last answer's end."""


def measure(checkout: Checkout, scene: Scene, url: str | None, rounds: int) -> list[Sample]:
    """A warm-up, then `rounds` rounds."""
    with (
        traced_gateway(checkout, scene.turns, scene.step_ms, url) as server,
        server.client(make_tenant(server.url, server.admin_key)) as client,
    ):
        return [_round(server.record, scene, client) for _ in range(rounds + 1)][1:]


def _round(record: Callable[[Callable[[], None]], dict[str, Recording]], scene: Scene, client: httpx.Client) -> Sample:
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    sessions = [client.post("/v1/sessions", json={"model": model, "sampling": _SAMPLING}) for _ in range(scene.turns)]
    paths = [f"/v1/sessions/{session.raise_for_status().json()['id']}/turns" for session in sessions]
    answers: list[str] = []
    times: list[float] = []

    def take_turns() -> None:
        started_at = time.monotonic()
        with ThreadPoolExecutor(scene.turns) as threads:
            answers.extend(threads.map(lambda path: _take_turn(client, path, scene.answer == "streamed"), paths))
        times.append(time.monotonic() - started_at)

    counted = record(take_turns)["gateway"].transactions
    deltas = sum(answer.count("event: output_text.delta") for answer in answers)
    counts = (counted.get("begin", 0), counted.get("commit", 0), deltas)
    return Sample(scene, *(count / scene.turns for count in counts), times[0])


def _take_turn(client: httpx.Client, path: str, stream: bool) -> str:
    body = {"input": "Tell me about the harbour.", "stream": stream}
    text = client.post(path, json=body).raise_for_status().text
    assert f'"completion_tokens":{_TOKENS}' in text, text[-1000:]
    return text


@contextmanager
def fresh_postgres(server_url: str) -> Iterator[str | None]:
    """The address of a new database, dropped at the end; None where no server answers."""
    name = f"graftwork_bench_{secrets.token_hex(6)}"
    if not asyncio.run(_execute(server_url, f'CREATE DATABASE "{name}"')):
        yield None
        return
    try:
        yield f"{server_url.rpartition('/')[0]}/{name}"
    finally:
        asyncio.run(_execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)'))


async def _execute(url: str, statement: str) -> bool:
    """False where no server answers."""
    try:
        connection = await asyncpg.connect(url, timeout=5)
    except (OSError, TimeoutError):
        return False
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
    return True


def show(samples: list[Sample]) -> None:
    table = Table(
        "database",
        "turns at once",
        "ms a step",
        "answer",
        "begin a turn: min",
        "median",
        "max",
        "commit",
        "text deltas",
        "s",
    )
    for scene in dict.fromkeys(sample.scene for sample in samples):
        own = [sample for sample in samples if sample.scene == scene]
        begins = [sample.begin for sample in own]
        others = ([sample.commit for sample in own], [sample.text_deltas for sample in own])
        table.add_row(
            scene.database,
            str(scene.turns),
            f"{scene.step_ms:g}",
            scene.answer,
            *(f"{figure:.1f}" for figure in (min(begins), statistics.median(begins), max(begins))),
            *(f"{statistics.median(figures):.1f}" for figures in others),
            f"{statistics.median(sample.seconds for sample in own):.2f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=OWN_ROOT)
    parser.add_argument("--postgres-url", default=os.environ.get("GRAFTWORK_TEST_POSTGRES_URL", DEFAULT_POSTGRES))
    parser.add_argument("--turns", default="1,32", help="how many run at once, comma-separated")
    parser.add_argument("--step-ms", default="2,25", help="between two steps of the engine, comma-separated")
    parser.add_argument("--answers", default="streamed,whole", help="of streamed and whole, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()
    checkout = Checkout(arguments.checkout.absolute())
    samples: list[Sample] = []
    lists = (arguments.turns, arguments.step_ms, arguments.answers)
    for turns, step_ms, answer in product(*(words.split(",") for words in lists)):
        scene = Scene("SQLite", int(turns), float(step_ms), answer)
        samples += measure(checkout, scene, None, arguments.rounds)
        with fresh_postgres(arguments.postgres_url) as url:
            if url is not None:
                samples += measure(checkout, replace(scene, database="PostgreSQL"), url, arguments.rounds)
    show(samples)
    if arguments.json:
        record = {"machine": describe_machine(), "samples": [asdict(sample) for sample in samples]}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
