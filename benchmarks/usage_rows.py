"""How fast a year of usage is read and written: reports, roll-up and inserts with 50 million rows in the ledger.

    python benchmarks/usage_rows.py [--rows 50000000] [--rounds 7] [--seconds 5] [--writers 8] [--postgres URL] [--json OUT]

Two databases of one PostgreSQL server: one is empty, the other gets `--rows` requests of one year by COPY, and their sums
by the statement that the gateways' roll-up uses. A tenth of the requests is of one tenant, the rest of 199 others.
Reports are those of `GET /v1/usage` and of the invoice, of November, for the large tenant, for a small one, and for all;
each is read once with a cold cache of this process and then `--rounds` times, and with `--plain` once from the rows alone.
Inserts are what gateways do when requests have ended (the rows, their entries in the queue, what their owners have spent
this month); rounds alternate between the two databases. `record` is one request in a transaction, by `--writers` at once;
`group` is 32 of them, as a gateway gathers under load, by two gateways at once. `batch` inserts are 1000 plain rows in one
transaction, where the commit weighs nothing. Both databases are dropped at the end.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sqlalchemy import text
from turn_transactions import DEFAULT_POSTGRES, fresh_postgres

from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.ids import EndUserId, KeyId, RequestId, SessionId, TenantId, new_id
from graftwork.platform.ledger.invoices import InvoiceMaker
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.rollup_rows import into_sums
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup
from graftwork.platform.prices import repository as prices
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import Rates
from graftwork.platform.settings.settings import async_database_url

_YEAR = (datetime(2025, 12, 1, tzinfo=UTC).timestamp(), datetime(2026, 12, 1, tzinfo=UTC).timestamp())
_NOVEMBER = (datetime(2026, 11, 1, tzinfo=UTC).timestamp(), _YEAR[1])
_NUM_TENANTS = 200
_LARGE, _SMALL = TenantId("ten_000"), TenantId("ten_123")
_LARGE_SHARE = 0.1
_GATEWAYS, _GROUP = 2, 32
_PRICES = PriceList("prc_1", None, None, "USD", Rates.read({"input": "0.5", "output": "1.5"}), 0.0, 0.0)
_GROUPS = (UsageGroup.DAY, UsageGroup.KEY, UsageGroup.USER, UsageGroup.ADAPTER, UsageGroup.MODEL)
_LINES = 50_000
_KINDS = 1 << 17
_COLUMNS = (
    "tenant_id", "request_id", "key_id", "model", "adapter", "session_id", "outcome", "prompt_tokens", "cached_tokens",
    "completion_tokens", "at", "day", "kv_byte_seconds", "engine_us", "service_tier", "price_id", "cost_atoms",
    "kv_cost_atoms", "end_user_id",
)  # fmt: skip


def tenant_of(generator: random.Random) -> str:
    number = 0 if generator.random() < _LARGE_SHARE else generator.randrange(1, _NUM_TENANTS)
    return f"ten_{number:03d}"


def lines(num_rows: int, on_rows: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the rows of a year in the order of their time, as CSV without a head, some thousands at a time.

    Each row has one of `_KINDS` requests, drawn at random, and an id and a time of its own.
    """
    generator = random.Random(18)
    kinds = [_kind(generator) for _ in range(_KINDS)]
    step = (_YEAR[1] - _YEAR[0]) / num_rows
    for first in range(0, num_rows, _LINES):
        numbers = range(first, min(first + _LINES, num_rows))
        drawn = generator.choices(kinds, k=len(numbers))
        yield "".join(
            [_line(number, _YEAR[0] + step * number, kind) for number, kind in zip(numbers, drawn, strict=True)]
        ).encode()
        on_rows(len(numbers))


def _kind(generator: random.Random) -> tuple[str, ...]:
    """The parts of a row between its request id, its session, its time and its day."""
    tenant, bits = tenant_of(generator), generator.getrandbits(48)
    key, user, version = bits & 3, (bits >> 2) & 63, (bits >> 8) & 3
    prompt, answer = 100 + ((bits >> 10) & 4095), 1 + ((bits >> 22) & 511)
    cost = (prompt * 5 + answer * 15) * 100_000
    return (
        f"{tenant},req_",
        f",key_{tenant}{key},agent{version},agent{version}@1,",
        f"ses_{tenant}{user:02d}" if bits >> 40 & 1 else "",
        f",completed,{prompt},{prompt >> 1},{answer},",
        f",{prompt << 20},{answer << 10},default,prc_1,{cost},0,usr_{tenant}{user:02d}\n",
    )


def _line(number: int, at: float, kind: tuple[str, ...]) -> str:
    request, names, session, counts, rest = kind
    in_session = f"{session}_{number >> 16:06d}" if session else ""
    return f"{request}{number:026d}{names}{in_session}{counts}{at:.3f},{_day(int(at) // 86_400)}{rest}"


@cache
def _day(number: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(number * 86_400))


async def fill(url: str, database: Database, num_rows: int, progress: Progress) -> dict[str, float]:
    """Fills the ledger by COPY, and makes the sums. Returns the seconds of both."""
    copied = progress.add_task("COPY", total=num_rows)

    async def source() -> AsyncIterator[bytes]:
        for part in lines(num_rows, lambda count: progress.advance(copied, count)):
            yield part

    connection = await asyncpg.connect(url)
    started_at = time.monotonic()
    await connection.execute("ALTER TABLE usage_events DISABLE TRIGGER queue_usage")
    indexes = await connection.fetch("SELECT indexdef FROM pg_indexes WHERE tablename = 'usage_events'")
    key = "ALTER TABLE usage_events {} CONSTRAINT pk_usage_events"
    await connection.execute(key.format("DROP"))
    await connection.execute("DROP INDEX ix_usage_events_tenant_id_at, ix_usage_events_session_id")
    await connection.copy_to_table("usage_events", source=source(), columns=_COLUMNS, format="csv")
    copied_at = time.monotonic()
    await connection.execute("SET maintenance_work_mem = '1GB'")
    steps = [one["indexdef"] for one in indexes if "pk_usage_events" not in one["indexdef"]]
    for step in [key.format("ADD") + " PRIMARY KEY (tenant_id, request_id)", *steps]:
        await connection.execute(step)
    await connection.execute("ALTER TABLE usage_events ENABLE TRIGGER queue_usage")
    indexed_at = time.monotonic()
    await _sum_all(connection, progress)
    summed_at = time.monotonic()
    await connection.execute("VACUUM ANALYZE usage_events, usage_sums, usage_unrolled")
    await connection.execute("CHECKPOINT")
    await connection.close()
    times = {"copy_s": copied_at - started_at, "indexes_s": indexed_at - copied_at, "sums_s": summed_at - indexed_at}
    return times | {"vacuum_s": time.monotonic() - summed_at}


async def _sum_all(connection: Any, progress: Progress) -> None:
    """Makes the sums of the year, ten days at a time. The rows lie in the order of time, so a small index finds them."""
    await connection.execute("CREATE INDEX by_time ON usage_events USING brin (at)")
    await connection.execute("SET work_mem = '1GB'")
    starts = range(int(_YEAR[0]), int(_YEAR[1]), 10 * 86_400)
    task = progress.add_task("sums", total=len(starts))
    for start in starts:
        span = f"u.at >= {start} AND u.at < {min(start + 10 * 86_400, int(_YEAR[1]))}"
        await connection.execute(into_sums("postgresql", "usage_events AS u", span))
        progress.advance(task)
    await connection.execute("DROP INDEX by_time")


def event(generator: random.Random) -> UsageEvent:
    """A request that ends now."""
    tenant = tenant_of(generator)
    return UsageEvent(
        request_id=RequestId(new_id("req")),
        tenant_id=TenantId(tenant),
        key_id=KeyId(f"key_{tenant}{generator.randrange(4)}"),
        model="agent0",
        adapter="agent0@1",
        session_id=SessionId(new_id("ses")) if generator.random() < 0.5 else None,
        prompt_tokens=1000,
        cached_tokens=500,
        completion_tokens=200,
        at=_YEAR[1] - 1.0,
        kv_byte_seconds=1 << 30,
        end_user_id=EndUserId(f"usr_{tenant}{generator.randrange(64):02d}"),
    ).priced(_PRICES)


async def insert_rate(meter: UsageMeter, seconds: float, writers: int, size: int, generator: random.Random) -> float:
    """Requests a second that so many writers record, `size` in a transaction."""
    ends_at = time.monotonic() + seconds
    counts = [0] * writers

    async def write(number: int) -> None:
        while time.monotonic() < ends_at:
            await meter.record_all([event(generator) for _ in range(size)])
            counts[number] += size

    started_at = time.monotonic()
    await asyncio.gather(*map(write, range(writers)))
    return sum(counts) / (time.monotonic() - started_at)


async def batch_rate(url: str, generator: random.Random, batches: int = 10) -> float:
    """Rows a second that one connection inserts, 1000 in a transaction."""
    connection = await asyncpg.connect(url)
    places = ", ".join(f"${number}" for number in range(1, len(_COLUMNS) + 1))
    statement = f"INSERT INTO usage_events ({', '.join(_COLUMNS)}) VALUES ({places})"
    started_at = time.monotonic()
    for _ in range(batches):
        events = [event(generator) for _ in range(1000)]
        values = {"cost_atoms": lambda one: one.cost.atoms, "kv_cost_atoms": lambda one: one.cost.kv_atoms}
        rows = [[values[name](one) if name in values else getattr(one, name) for name in _COLUMNS] for one in events]
        async with connection.transaction():
            await connection.executemany(statement, rows)
    rate = batches * 1000 / (time.monotonic() - started_at)
    await connection.close()
    return rate


async def report_times(database: Database, rounds: int, plain: bool) -> dict[str, Any]:
    """Seconds of each report of November, the first one and the median of the next ones."""
    meter, invoices = UsageMeter(database), InvoiceMaker(database)
    reports: dict[str, Callable[[], Any]] = {}
    for name, tenant in (("large", _LARGE), ("small", _SMALL), ("all tenants", None)):
        for group in _GROUPS if tenant else (UsageGroup.TENANT, UsageGroup.DAY):
            reports[f"{name} by {group}"] = lambda tenant=tenant, group=group: meter.summarise(
                tenant, *_NOVEMBER, group
            )
    odd = (_NOVEMBER[0] + 12_345.6, _NOVEMBER[1] - 4321.0)
    reports["large by day, odd times"] = lambda: meter.summarise(_LARGE, *odd, UsageGroup.DAY)
    reports["large by user, odd times"] = lambda: meter.summarise(_LARGE, *odd, UsageGroup.USER)
    reports["large invoice"] = lambda: invoices.make(_LARGE, "2026-11")
    times = {name: await _timed(report, rounds) for name, report in reports.items()}
    if plain:
        async with database.write() as session:
            await session.execute(text("UPDATE usage_rollup_state SET is_complete = false"))
        plainly = {"large by day": reports["large by day"], "large invoice": reports["large invoice"]}
        times |= {f"{name}, from the rows": await _timed(report, 2) for name, report in plainly.items()}
        async with database.write() as session:
            await session.execute(text("UPDATE usage_rollup_state SET is_complete = true"))
    return times


async def _timed(report: Callable[[], Any], rounds: int) -> dict[str, float]:
    seconds = []
    for _ in range(rounds + 1):
        started_at = time.monotonic()
        await report()
        seconds.append(time.monotonic() - started_at)
    first, *later = seconds
    return {"first_s": first, "median_s": statistics.median(later), "max_s": max(later)}


async def is_exact(database: Database, url: str) -> bool:
    """Whether the report of all tenants has the same sums as one statement over all rows."""
    connection = await asyncpg.connect(url)
    expected = await connection.fetchrow(
        "SELECT count(*), sum(prompt_tokens), sum(completion_tokens), sum(kv_byte_seconds), sum(cost_atoms)"
        " FROM usage_events"
    )
    await connection.close()
    found = await UsageMeter(database).summarise(None, _YEAR[0], _YEAR[1], UsageGroup.DAY)
    total = sum((replace(one, group=None) for one in found[1:]), replace(found[0], group=None))
    sums = total.requests, total.prompt_tokens, total.completion_tokens, total.used.kv_byte_seconds
    return (*sums, total.costs["USD"].atoms) == tuple(int(figure) for figure in expected)


async def measure(options: argparse.Namespace, urls: dict[str, str], progress: Progress) -> dict[str, Any]:
    databases = {name: Database(async_database_url(url)) for name, url in urls.items()}
    for database in databases.values():
        await database.upgrade_to_head()
        async with database.write() as session:
            await prices.add_price_list(session, _PRICES)
    figures: dict[str, Any] = {"fill": await fill(urls["full"], databases["full"], options.rows, progress)}
    figures["sizes"] = await _sizes(urls["full"])
    figures["reports"] = await report_times(databases["full"], options.rounds, options.plain)
    figures["inserts"] = await _inserts(options, urls, databases, progress)
    started_at = time.monotonic()
    num_rolled = await UsageRollups(databases["full"], SystemClock()).roll_up()
    figures["roll_up"] = {"rows": num_rolled, "rows_per_s": num_rolled / (time.monotonic() - started_at)}
    figures["is_exact"] = await is_exact(databases["full"], urls["full"])
    for database in databases.values():
        await database.close()
    return figures


async def _inserts(
    options: argparse.Namespace, urls: dict[str, str], databases: dict[str, Database], progress: Progress
) -> dict[str, Any]:
    generator = random.Random(19)
    sizes = {"record": (options.writers, 1), "group": (_GATEWAYS, _GROUP)}
    rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in urls} for kind in (*sizes, "batch")}
    task = progress.add_task("inserts", total=options.rounds + 1)
    for number in range(options.rounds + 1):
        for name in sorted(urls, reverse=bool(number % 2)):
            meter = UsageMeter(databases[name])
            found = {
                kind: await insert_rate(meter, options.seconds, writers, size, generator)
                for kind, (writers, size) in sizes.items()
            }
            found["batch"] = await batch_rate(urls[name], generator)
            if number:  # the first round warms up
                for kind, rate in found.items():
                    rates[kind][name].append(rate)
        progress.advance(task)
    return {
        kind: {
            **{name: {"median": statistics.median(found), "all": found} for name, found in of_kind.items()},
            "ratio": statistics.median(of_kind["full"]) / statistics.median(of_kind["empty"]),
        }
        for kind, of_kind in rates.items()
    }


async def _sizes(url: str) -> dict[str, int]:
    connection = await asyncpg.connect(url)
    sizes = {
        name: await connection.fetchval(f"SELECT {function}('{table}')")
        for name, function, table in (
            ("rows_bytes", "pg_table_size", "usage_events"),
            ("rows_index_bytes", "pg_indexes_size", "usage_events"),
            ("sums_bytes", "pg_total_relation_size", "usage_sums"),
        )
    }
    sizes["sums"] = await connection.fetchval("SELECT count(*) FROM usage_sums")
    await connection.close()
    return sizes


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("report of November", "first", "median", "slowest")
    for name, times in figures["reports"].items():
        table.add_row(name, *(f"{1000 * times[part]:.0f} ms" for part in ("first_s", "median_s", "max_s")))
    console.print(table)
    for kind, rates in figures["inserts"].items():
        full, empty = (rates[name]["median"] for name in ("full", "empty"))
        console.print(f"{kind}: {full:.0f}/s with the rows, {empty:.0f}/s empty, ratio {rates['ratio']:.2f}")
    console.print({name: figures[name] for name in ("fill", "sizes", "roll_up", "is_exact")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--postgres", default=DEFAULT_POSTGRES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        made = {name: stack.enter_context(fresh_postgres(options.postgres)) for name in ("empty", "full")}
        urls = {name: url for name, url in made.items() if url is not None}
        if len(urls) < len(made):
            parser.error(f"no PostgreSQL answers at {options.postgres}")
        progress = stack.enter_context(Progress(console=console))
        machine = describe_machine()
        figures = asyncio.run(measure(options, urls, progress))
    show(figures, console)
    if options.json is not None:
        record = {"machine": machine, "rows": options.rows, "writers": options.writers, **figures}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
