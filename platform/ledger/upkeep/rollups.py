"""Keeps the sums of the usage ledger up to date, and prunes rows that are in them.

    rows older than the sums ──► queued, in parts ──► all queued: reports read the sums from now on
    new rows (queued by the database) ──► added to the sums of their hour and day, in parts
    rows older than `keep_s` ──► a file of the archive ──► deleted

Owns the order of these steps. Every part is one transaction, so a gateway that dies repeats a part or has done it.
Invariant: a row is deleted only after it is in the sums, and in the archive if there is one.
"""

import asyncio
from pathlib import Path

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger import rollup_rows
from graftwork.platform.ledger.upkeep.archive import write_rows

ROLL_UP_S = 10.0
"""Seconds between two looks for rows that are not in the sums."""
_PART = 5_000
_PARTS_AT_ONCE = 20
"""So many parts a call at most: 100,000 rows."""


class UsageRollups:
    """Rolls up and prunes the ledger, for all gateways that share the database. Several may do it at the same time."""

    def __init__(
        self, database: Database, clock: Clock, keep_s: float | None = None, archive: Path | None = None
    ) -> None:
        """Rows are pruned after `keep_s` seconds; None keeps them for ever. `archive` is a folder for pruned rows."""
        self._database = database
        self._clock = clock
        self._keep_s = keep_s
        self._archive = archive

    async def roll_up(self, part: int = _PART) -> int:
        """Adds queued rows to the sums. Returns their number: fewer than there are, if there are very many.

        First queues the rows that are older than the sums. Raises Unavailable if the database does not answer.
        """
        total = 0
        for _ in range(_PARTS_AT_ONCE):
            num_rows = await self._roll_up_part(part)
            total += num_rows or 0
            if num_rows is not None and num_rows < part:
                break
        return total

    async def _roll_up_part(self, part: int) -> int | None:
        """Adds one part to the sums, and returns its number of rows; None after it has queued older rows instead."""
        async with self._database.write() as session:
            if not await rollup_rows.hold_rollup(session):
                return 0
            state = await rollup_rows.begin_state(session)
            if not state.is_complete:
                await rollup_rows.queue_older(session, state, part)
                return None
            return await rollup_rows.roll_up(session, part)

    async def prune(self) -> int:
        """Deletes rows whose time is over, after they are in the sums and in the archive. Returns their number.

        Raises Unavailable if the database does not answer, and OSError if the archive cannot be written.
        """
        if self._keep_s is None:
            return 0
        before = int(self._clock.now() - self._keep_s) // rollup_rows.DAY_S * rollup_rows.DAY_S
        async with self._database.write() as session:
            if not (await rollup_rows.begin_state(session)).is_complete:
                return 0
            await rollup_rows.mark_pruned(session, before)
        async with self._database.read() as session:
            tenants = await rollup_rows.find_tenants_before(session, before)
        return sum([await self._prune_tenant(tenant_id, before) for tenant_id in tenants])

    async def _prune_tenant(self, tenant_id: TenantId, before: int) -> int:
        total = 0
        for _ in range(_PARTS_AT_ONCE):
            async with self._database.read() as session:
                rows = await rollup_rows.find_prunable(session, tenant_id, before, _PART)
            if not rows:
                break
            if self._archive is not None:
                await asyncio.to_thread(write_rows, self._archive, rows)
            async with self._database.write() as session:
                await rollup_rows.delete_rows(session, tenant_id, [row.request_id for row in rows])
            total += len(rows)
        return total
