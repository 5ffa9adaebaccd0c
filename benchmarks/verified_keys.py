"""What it costs a gateway to know whose key a request has: a verified key, a console ticket, and a first use.

    python benchmarks/verified_keys.py [--calls 20000] [--json OUT]

Times `Authenticator.authenticate` of a real gateway's parts on a SQLite file: all that stands between the text of a key
and its principal, with the limit of wrong keys, the check of the address (the key has a list of three networks) and the
note of its use. `read` is the same without the memory of verified keys, as the first use of a key after a change costs.

Then a second gateway's part learns of revocations that the first makes: `revoked elsewhere` is the time from the
answer of the revocation to the first refusal there, over `--revocations` rounds.

    holds if: a verified key costs less than 50 us (p50), and a revocation holds elsewhere within a second (all rounds)
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from machine import describe_machine

from graftwork.api.deps.background import repeating
from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.tenancy.authenticator import AdminKey, Authenticator
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.verified_keys import POLL_S

_PEPPER, _ADDRESS, _LIMIT_US = b"a pepper", "192.0.2.7", 50.0
_NETWORKS = ["2001:db8::/32", "198.51.100.0/24", "192.0.2.0/24"]
_OTHER_KEYS, _WITHIN_MS = 1000, 1000.0


async def measure(calls: int, database: Database) -> dict[str, dict[str, float]]:
    """Returns microseconds by case."""
    await database.upgrade_to_head()
    clock = SystemClock()
    tenancy = Tenancy(database, _PEPPER, clock)
    gate = Authenticator.of_gateway(tenancy, AdminKey("gwa_admin_secret", _PEPPER, clock), clock, 20)
    tenant = await tenancy.create_tenant("acme")
    keys = [(await tenancy.create_key(tenant.id, "k", allowed_ips=_NETWORKS))[1] for _ in range(_OTHER_KEYS)]
    ticket = (await tenancy.ticket_for(keys[0])).text
    await tenancy.changes.poll()
    for key in keys:
        await gate.authenticate(key, _ADDRESS)
    return {
        "a verified key": await _timed(gate, tenancy, [keys[0]], calls, polls=True),
        "a thousand verified keys": await _timed(gate, tenancy, keys, calls, polls=True),
        "a ticket of the console": await _timed(gate, tenancy, [ticket], calls, polls=True),
        "read": await _timed(gate, Tenancy(database, _PEPPER, clock), keys, min(calls, 2000), polls=False),
    }


async def revoke_elsewhere(rounds: int, database: Database) -> list[float]:
    """Returns, for each round, the milliseconds after which another gateway refuses a revoked key."""
    clock = SystemClock()
    here, elsewhere = Tenancy(database, _PEPPER, clock), Tenancy(database, _PEPPER, clock)
    tenant = await here.create_tenant("acme")
    times = []
    async with repeating(elsewhere.changes.poll, POLL_S, "reading the changes of access"):
        for number in range(rounds):
            stored, key = await here.create_key(tenant.id, "k")
            await asyncio.sleep(POLL_S * (1 + number / rounds))
            await elsewhere.authenticate(key)
            await here.revoke_key(tenant.id, stored.id)
            began = time.perf_counter()
            with suppress(NotAuthenticated):
                while True:
                    await elsewhere.authenticate(key)
                    await asyncio.sleep(0.001)
            times.append((time.perf_counter() - began) * 1000)
    return times


async def _timed(
    gate: Authenticator, tenancy: Tenancy, tokens: list[str], calls: int, *, polls: bool
) -> dict[str, float]:
    if not polls:  # a gateway that never polls reads each key
        clock = SystemClock()
        gate = Authenticator.of_gateway(tenancy, AdminKey("gwa_admin_secret", _PEPPER, clock), clock, 20)
    times = []
    for number in range(calls):
        if polls and number % 500 == 0:
            await tenancy.changes.poll()
        began = time.perf_counter_ns()
        await gate.authenticate(tokens[number % len(tokens)], _ADDRESS)
        times.append((time.perf_counter_ns() - began) / 1000)
    cuts = statistics.quantiles(times, n=100)
    return {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1), "mean_us": round(statistics.fmean(times), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--revocations", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        async def run() -> tuple[dict[str, dict[str, float]], list[float]]:
            database = Database(f"sqlite+aiosqlite:///{folder}/keys.db")
            try:
                figures = await measure(arguments.calls, database)
                return figures, await revoke_elsewhere(arguments.revocations, database)
            finally:
                await database.close()

        figures, delays = asyncio.run(run())
    for case, figure in figures.items():
        print(
            f"{case:26} p50 {figure['p50_us']:7.1f} us   p99 {figure['p99_us']:7.1f} us   mean {figure['mean_us']:7.1f} us"
        )
    elsewhere = {"p50_ms": round(statistics.median(delays), 1), "max_ms": round(max(delays), 1)}
    print(f"{'revoked elsewhere':26} p50 {elsewhere['p50_ms']:7.1f} ms   max {elsewhere['max_ms']:7.1f} ms")
    holds = figures["a verified key"]["p50_us"] < _LIMIT_US and max(delays) < _WITHIN_MS
    print("holds" if holds else "does not hold")
    if arguments.json:
        told = {"machine": describe_machine(), "figures": figures, "revoked elsewhere": elsewhere}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
