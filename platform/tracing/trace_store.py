"""Stores the traces of traced requests that have ended in the database, for some minutes, so that every gateway finds them.

    request ends ──► offer ──► flush, once a second ──► database ──► find, by any gateway

Owns the rows, their number and their age. A request that is not traced costs nothing here, and stays with the gateway
that has served it. Never keeps text or token ids: a timeline has none.
Invariants: a tenant finds only its own requests. What waits, and what is stored, is bounded: by tenant, in all, and in
time. If the database does not answer, the latest traces wait for it and older ones are dropped.
"""

import asyncio
import json
import zlib
from collections import deque
from typing import Any

from graftwork.platform.answers.timelines import Timeline
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.ids import TenantId
from graftwork.platform.tracing import repository
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.platform.tracing.timeline import timeline_of

KEPT_S = 900.0
"""A trace is found for so many seconds after its request's end."""
MAX_STORED_OF_TENANT = 256
MAX_STORED = 20_000
MAX_WAITING = 512
MAX_BYTES = 128 * 1024
"""A longer compressed timeline is stored without the engine's spans."""
_SWEEP_EVERY_S = 30.0


class TraceStore:
    """The traces that the gateways of one database share."""

    def __init__(self, database: Database, clock: Clock, gateway_id: str) -> None:
        self._database = database
        self._clock = clock
        self._gateway_id = gateway_id
        self._waiting: deque[RequestTrace] = deque(maxlen=MAX_WAITING)
        self._swept_at = float("-inf")
        self._writing = asyncio.Lock()

    def offer(self, trace: RequestTrace) -> None:
        """Takes a request that has ended. Stores it with the next `flush` if it is traced and has begun its work."""
        if trace.is_traced and trace.model is not None:
            self._waiting.append(trace)

    async def flush(self) -> None:
        """Stores what waits, and deletes what is too old or too much. A call beside another waits for its end."""
        async with self._writing:
            batch = tuple(self._waiting)
            is_due = self._clock.monotonic() - self._swept_at >= _SWEEP_EVERY_S
            if batch or is_due:
                await self._store(batch, is_due=is_due)

    async def _store(self, batch: tuple[RequestTrace, ...], *, is_due: bool) -> None:
        rows = await asyncio.to_thread(self._rows, batch)
        async with self._database.write() as session:
            await repository.add_traces(session, rows)
            for tenant_id in {TenantId(row["tenant_id"]) for row in rows}:
                await repository.keep_latest(session, tenant_id, MAX_STORED_OF_TENANT)
            if is_due:
                await repository.forget_older(session, self._clock.now() - KEPT_S)
                await repository.keep_latest(session, None, MAX_STORED)
        if is_due:
            self._swept_at = self._clock.monotonic()
        stored = {id(trace) for trace in batch}
        self._waiting = deque((one for one in self._waiting if id(one) not in stored), maxlen=MAX_WAITING)

    async def find(self, request_id: str, tenant_id: TenantId | None = None) -> Timeline | None:
        """Returns the timeline of a request of any gateway, by any of its ids. With `tenant_id`, only of this tenant."""
        ended_after = self._clock.now() - KEPT_S
        async with self._database.read() as session:
            body = await repository.find_trace(session, request_id, tenant_id, ended_after)
        return None if body is None else Timeline.read(json.loads(zlib.decompress(body)))

    async def forget(self, tenant_id: TenantId) -> None:
        """Deletes the traces of a deleted tenant, also those that a `flush` is storing."""
        async with self._writing:
            self._waiting = deque((one for one in self._waiting if one.tenant_id != tenant_id), maxlen=MAX_WAITING)
            async with self._database.write() as session:
                await repository.forget_tenant(session, tenant_id)

    def _rows(self, batch: tuple[RequestTrace, ...]) -> list[dict[str, Any]]:
        return [self._row(trace) for trace in batch]

    def _row(self, trace: RequestTrace) -> dict[str, Any]:
        timeline = timeline_of(trace, self._gateway_id)
        body = _encoded(timeline)
        if len(body) > MAX_BYTES:
            bare = tuple(one.model_copy(update={"engines": ()}) for one in timeline.generations)
            body = _encoded(timeline.model_copy(update={"generations": bare, "traced": False}))
        return {
            "id": timeline.id,
            "tenant_id": timeline.tenant_id,
            "client_request_id": timeline.client_request_id,
            "work_id": timeline.turn_id,
            "ended_at": trace.created_at + trace.total_s,
            "body": body,
        }


def _encoded(timeline: Timeline) -> bytes:
    return zlib.compress(timeline.model_dump_json().encode())
