"""Gives all watchers of a gateway the same snapshots, built and encoded at most once a second for each view.

    watcher ──► get(view) ──► the encoded answer of this second, shared
                   └─ none yet ──► ask the engines once ──► make the rows ──► encode

Owns the encoded answers. Works only while somebody watches. An answer keeps its ETag, sequence and time while nothing in
it has changed.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass

import graftwork
from graftwork.api.overview.directory import OwnerDirectory
from graftwork.api.overview.engines import EngineBoard
from graftwork.api.overview.rows import Placement, RowMaker
from graftwork.api.overview.views import View
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.activity.windows import WINDOW_S
from graftwork.platform.answers.overview import Overview

FRESH_S = 1.0
"""A snapshot is shared for so many seconds."""
_MAX_VIEWS = 256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One encoded answer."""

    etag: str
    body: bytes
    """JSON of an `Overview`."""
    made_at: float
    """On the monotonic clock."""


class OverviewBoard:
    """The snapshots of one gateway."""

    def __init__(self, meter: ActivityMeter, engines: EngineBoard, directory: OwnerDirectory, model: str) -> None:
        self._meter = meter
        self._engines = engines
        self._directory = directory
        self._model = model
        self._clock = meter.clock
        self._sequence = 0
        self._snapshots: OrderedDict[View, Snapshot] = OrderedDict()
        self._refreshing = asyncio.Lock()
        self._refreshed_at: float | None = None

    async def get(self, view: View) -> Snapshot:
        """Returns the snapshot of a view, at most `FRESH_S` seconds old."""
        found = self._snapshots.get(view)
        if found is not None and self._clock.monotonic() - found.made_at < FRESH_S:
            return found
        async with self._refreshing:
            now = self._clock.monotonic()
            found = self._snapshots.get(view)  # another watcher may have made it while this one waited
            if found is not None and now - found.made_at < FRESH_S:
                return found
            if self._refreshed_at is None or now - self._refreshed_at >= FRESH_S:
                await asyncio.gather(self._engines.refresh(), self._directory.refresh())
                self._refreshed_at = self._clock.monotonic()
            return self._make(view, found)

    async def close(self) -> None:
        await self._engines.close()

    def _make(self, view: View, former: Snapshot | None) -> Snapshot:
        now = self._clock.monotonic()
        content = self._content(view).model_dump_json(exclude={"object", "sequence", "at"}).encode()
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        if former is not None and former.etag == etag:
            made = Snapshot(etag, former.body, now)
        else:
            self._sequence += 1
            head = {"object": "overview", "sequence": self._sequence, "at": round(self._clock.now(), 3)}
            made = Snapshot(etag, json.dumps(head, separators=(",", ":")).encode()[:-1] + b"," + content[1:], now)
        self._snapshots[view] = made
        self._snapshots.move_to_end(view)
        if len(self._snapshots) > _MAX_VIEWS:
            self._snapshots.popitem(last=False)
        return made

    def _content(self, view: View) -> Overview:
        maker = RowMaker(view, self._meter, self._directory.names)
        tenants, adapters, sessions = maker.tenant_ids(), maker.adapter_keys(), maker.session_ids()
        placement = Placement(self._engines.adapters_on_device, self._engines.adapters_on_host)
        return Overview(
            sequence=0,
            at=0.0,
            window_s=int(WINDOW_S),
            version=graftwork.__version__,
            model=self._model,
            sort=view.sort,
            totals=maker.totals(tenants, len(adapters), len(sessions)),
            engines=self._engines.rows() if view.is_operator else (),
            tenants=maker.tenants(tenants),
            adapters=maker.adapters(adapters, placement),
            sessions=maker.sessions(sessions),
        )
