"""Gives all watchers of a gateway the same snapshots, built and encoded at most once a second for each view.

    watcher ──► get(view) ──► the encoded answer of this second, shared
                   └─ none yet ──► ask the engines once ──► make the rows ──► encode
            └─► follow(view, write)    the same again and again, in one connection: a tenth of the work of asking

Owns the encoded answers. Works only while somebody watches. An answer keeps its ETag, sequence and time while nothing in
it has changed.
"""

import asyncio
import gzip
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import graftwork
from graftwork.api.http.repeats import Reply
from graftwork.api.overview.directory import OwnerDirectory
from graftwork.api.overview.engines import EngineBoard
from graftwork.api.overview.rows import Placement, RowMaker
from graftwork.api.overview.views import KnownQueries, View
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.activity.windows import WINDOW_S
from graftwork.platform.answers.overview import Overview
from graftwork.platform.clock import Clock

FRESH_S = 0.9
"""A snapshot is shared for so many seconds."""
TICK_S = 1.0
"""The seconds between two snapshots of those who follow. Longer than `FRESH_S`, so that each is a new one."""
_MAX_VIEWS = 256
_COMPRESSION = 3
"""The level of gzip: a snapshot of 50 tenants shrinks to a tenth in half a millisecond."""


@dataclass(frozen=True)
class Snapshot:
    """One encoded answer. All who ask share its bytes, also the compressed ones."""

    etag: str
    """Of the body as it is; the compressed body has another one."""
    body: bytes
    """JSON of an `Overview`."""
    made_at: float
    """On the monotonic clock."""
    event: bytes
    """The body as a server-sent event."""

    def reply(self, takes_gzip: bool, if_none_match: str) -> Reply:
        """Returns the answer to a request. It is a 304 if the watcher has this snapshot already, in either form."""
        whole, unchanged = self._compressed if takes_gzip else self._plain
        if not if_none_match:
            return whole
        named = [one.strip() for one in if_none_match.split(",")]
        return unchanged if self.etag in named or self._compressed_etag in named else whole

    @property
    def _compressed_etag(self) -> str:
        return f'{self.etag[:-1]}-gzip"'

    @cached_property
    def _plain(self) -> tuple[Reply, Reply]:
        return _replies(self.body, {"etag": self.etag}, {})

    @cached_property
    def _compressed(self) -> tuple[Reply, Reply]:
        """The same with the body compressed, when it is first asked for."""
        body = gzip.compress(self.body, _COMPRESSION, mtime=0)
        return _replies(body, {"etag": self._compressed_etag}, {"content-encoding": "gzip"})


class SharedSnapshot:
    """The latest snapshot of one view."""

    __slots__ = ("_monotonic", "latest")

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self.latest: Snapshot | None = None

    def fresh(self) -> Snapshot | None:
        """Returns the snapshot if it is at most `FRESH_S` seconds old."""
        latest = self.latest
        return latest if latest is not None and self._monotonic() - latest.made_at < FRESH_S else None


def _replies(body: bytes, of_both: Mapping[str, str], of_body: Mapping[str, str]) -> tuple[Reply, Reply]:
    """Returns the answer with the body, and the one that says that nothing has changed."""
    headers = {"cache-control": "no-cache", "vary": "accept-encoding", **of_both}
    return Reply(200, {**headers, **of_body, "content-type": "application/json"}, body), Reply(304, headers)


class OverviewBoard:
    """The snapshots of one gateway."""

    def __init__(self, meter: ActivityMeter, engines: EngineBoard, directory: OwnerDirectory, model: str) -> None:
        self._meter = meter
        self._engines = engines
        self._directory = directory
        self._model = model
        self.known_queries = KnownQueries()
        self._clock = meter.clock
        self._sequence = 0
        self._snapshots: OrderedDict[View, SharedSnapshot] = OrderedDict()
        self._refreshing = asyncio.Lock()
        self._refreshed_at: float | None = None
        self._tick = asyncio.Event()
        """Is set when those who follow look again, and then replaced."""
        self._ticking: asyncio.Task[None] | None = None
        self._num_following = 0
        self._is_ending = False

    def shared(self, view: View) -> SharedSnapshot:
        """Returns where the snapshots of a view are found."""
        found = self._snapshots.get(view)
        if found is None:
            found = self._snapshots[view] = SharedSnapshot(self._clock)
            if len(self._snapshots) > _MAX_VIEWS:
                self._snapshots.popitem(last=False)
        return found

    async def get(self, view: View) -> Snapshot:
        """Returns the snapshot of a view, at most `FRESH_S` seconds old."""
        shared = self.shared(view)
        if (found := shared.fresh()) is not None:
            return found
        async with self._refreshing:
            if (found := shared.fresh()) is not None:  # another watcher has made it while this one waited
                return found
            now = self._clock.monotonic()
            if self._refreshed_at is None or now - self._refreshed_at >= FRESH_S:
                await asyncio.gather(self._engines.refresh(), self._directory.refresh())
                self._refreshed_at = self._clock.monotonic()
            shared.latest = self._make(view, shared.latest)
            if view in self._snapshots:
                self._snapshots.move_to_end(view)
            return shared.latest

    async def follow(self, view: View, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes each new snapshot of a view as a server-sent event, until the caller is cancelled or the server stops."""
        etag = ""
        self._num_following += 1
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._beat(), name="snapshots of those who follow")
        try:
            while not self._is_ending:
                tick, snapshot = self._tick, await self.get(view)
                if snapshot.etag != etag:
                    etag = snapshot.etag
                    await write(snapshot.event)
                await tick.wait()
        finally:
            self._num_following -= 1

    def end_streams(self) -> None:
        """Ends all that follow, because the server stops."""
        self._is_ending = True
        self._tick.set()

    async def close(self) -> None:
        self.end_streams()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._engines.close()

    async def _beat(self) -> None:
        """Wakes those who follow, once a second, while there are any."""
        while self._num_following:
            await asyncio.sleep(TICK_S)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()
        self._ticking = None

    def _make(self, view: View, former: Snapshot | None) -> Snapshot:
        now = self._clock.monotonic()
        content = self._content(view).model_dump_json(exclude={"object", "sequence", "at"}).encode()
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        if former is not None and former.etag == etag:
            return replace(former, made_at=now)
        self._sequence += 1
        head = {"object": "overview", "sequence": self._sequence, "at": round(self._clock.now(), 3)}
        body = json.dumps(head, separators=(",", ":")).encode()[:-1] + b"," + content[1:]
        return Snapshot(etag, body, now, b"event: overview\ndata: " + body + b"\n\n")

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
