"""Turns what engines report into rows of an overview: their state, their figures, and rates since the report before.

Owns the latest report of each engine. Asks each engine at most once for all watchers, and never waits longer than
`_PATIENCE_S` for it: an engine that is slow to answer shows its latest report, and how old it is.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.fleet.replicas import ReplicaDirectory, ReplicaReading
from graftwork.platform.answers import overview as answers
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError

_log = logging.getLogger(__name__)

_PATIENCE_S = 0.5
_OLD_S = 2.0
"""A report is shown as old when it is older than this."""


@dataclass(frozen=True, slots=True)
class _Report:
    """An engine's latest answer, and what changed since the one before."""

    reading: ReplicaReading
    at: float
    """On the monotonic clock."""
    prompt_per_s: float | None = None
    generated_per_s: float | None = None
    step_ms: float | None = None

    def next(self, reading: ReplicaReading, at: float) -> "_Report":
        """Returns the report after this one. Without figures in either, it has no rates."""
        before, after, seconds = self.reading.stats, reading.stats, at - self.at
        if before is None or after is None or after.steps < before.steps or seconds <= 0:
            return _Report(reading, at)
        steps, busy_s = after.steps - before.steps, after.step_seconds - before.step_seconds
        return _Report(
            reading,
            at,
            max(after.prompt_tokens - before.prompt_tokens, 0) / seconds,
            max(after.generated_tokens - before.generated_tokens, 0) / seconds,
            1000 * busy_s / steps if steps and busy_s > 0 else self.step_ms,
        )


class EngineBoard:
    """The rows of all engines."""

    def __init__(self, replicas: ReplicaDirectory, description: EngineDescription, clock: Clock) -> None:
        self._replicas = replicas
        self._description = description
        self._clock = clock
        self._asking: asyncio.Task[list[ReplicaReading]] | None = None
        self._reports: dict[str, _Report] = {}

    async def refresh(self) -> None:
        """Asks all engines for their figures, and waits for at most `_PATIENCE_S` seconds. One question is under way at
        a time.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._replicas.list(), name="overview of engines")
        await asyncio.wait({self._asking}, timeout=_PATIENCE_S)
        if self._asking.done():
            answered, self._asking = self._asking, None
            try:
                self._take(answered.result())
            except GraftworkError as error:
                _log.warning("the figures of engines are old: %s", error.message)

    async def close(self) -> None:
        """Gives up the question that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    @property
    def adapters_on_device(self) -> Mapping[str, tuple[str, ...]]:
        """By digest of an adapter, the engines that have it on their device."""
        return _engines_by_digest((one.reading.replica_id, one.reading.stats, "resident") for one in self._shown())

    @property
    def adapters_on_host(self) -> Mapping[str, tuple[str, ...]]:
        """By digest of an adapter, the engines that have it in host memory."""
        return _engines_by_digest((one.reading.replica_id, one.reading.stats, "host") for one in self._shown())

    def rows(self) -> tuple[answers.EngineOverview, ...]:
        """Returns one row an engine, by id."""
        now = self._clock.monotonic()
        return tuple(self._row(report, now) for report in self._shown())

    def _shown(self) -> list[_Report]:
        return [self._reports[one] for one in sorted(self._reports)]

    def _take(self, readings: list[ReplicaReading]) -> None:
        now, before = self._clock.monotonic(), self._reports
        self._reports = {}
        for reading in readings:
            former = before.get(reading.replica_id)
            fresh = _Report(reading, now) if former is None else former.next(reading, now)
            if reading.stats is None and former is not None:  # what it said last, in its present state
                fresh = replace(former, reading=replace(reading, stats=former.reading.stats))
            self._reports[reading.replica_id] = fresh

    def _row(self, report: _Report, now: float) -> answers.EngineOverview:
        reading, stats, age_s = report.reading, report.reading.stats, now - report.at
        known: dict[str, object] = {
            "id": reading.replica_id,
            "status": reading.status,
            "reason": reading.problem,
            "epoch": reading.epoch if reading.epoch is not None else self._description.epoch,
            "address": reading.address,
            "version": reading.version or self._description.version or None,
        }
        if stats is None:
            return answers.EngineOverview(**known)  # type: ignore[arg-type]
        return answers.EngineOverview(
            **known,  # type: ignore[arg-type]
            running=stats.running_requests,
            waiting=stats.waiting_requests,
            queued_tokens=stats.queued_tokens,
            pages=_pages(stats),
            prompt_tokens_per_s=_rounded(report.prompt_per_s),
            generated_tokens_per_s=_rounded(report.generated_per_s),
            step_ms=_rounded(report.step_ms, 2),
            adapters_resident=len(stats.resident_adapters),
            stale_s=round(age_s) if age_s >= _OLD_S else None,
        )


def _pages(stats: EngineStats) -> answers.PagesByTier:
    device, host = stats.cached_pages + stats.active_pages, stats.host_cached_pages
    return answers.PagesByTier(
        device=answers.TierPages(used=device + stats.in_flight_pages, free=stats.free_pages),
        host=answers.TierPages(used=host + stats.host_in_flight_pages, free=stats.host_free_pages),
        disk=answers.TierPages(used=stats.disk_pages, free=None),
    )


def _engines_by_digest(held: Iterable[tuple[str, EngineStats | None, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for engine, stats, tier in held:
        digests = () if stats is None else stats.resident_adapters if tier == "resident" else stats.host_adapters
        for digest in digests:
            found[digest] = (*found.get(digest, ()), engine)
    return found


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
