"""Keeps a server under a steady load for a long time, and looks for drift: in memory, descriptors and latencies.

Owns the intervals and what is checked. Ends after its time, or when it is told to, and then reports what it has.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from graftwork.api.cli.bench.figures import percentile
from graftwork.api.cli.bench.load import ChatShape, Load, Target
from graftwork.api.cli.bench.page import Claim, Lines
from graftwork.api.cli.bench.process_watch import ProcessUse, process_use
from graftwork.api.cli.bench.report import Report, ms
from graftwork.api.cli.bench.stream_client import tls_context
from graftwork.platform.clock import Clock

CHAT = ChatShape(words=30, max_tokens=32)
_MAX_GROWTH = 1.1
"""The most by which memory and descriptors may grow from the second quarter of the run to the last."""
_MAX_DRIFT = 1.5
"""The most by which the median time to the first token may grow in the same time."""
_LEAST_INTERVALS = 8
"""With fewer there are no quarters to compare."""
_COLUMNS = ("minute", "sent", "answered", "refused", "failed", "TTFT p50 ms", "TTFT p99 ms", "memory MB", "descriptors")


@dataclass(frozen=True, slots=True)
class Interval:
    """What was seen between two readings. Times are in seconds; a figure without samples is None."""

    until_s: float
    """Since the start of the run."""
    sent: int
    answered: int
    refused: int
    failed: int
    ttft_p50: float | None
    ttft_p99: float | None
    use: ProcessUse | None
    """Of the server at the end of the interval; None for a server at `--url`."""

    @property
    def memory_mb(self) -> float | None:
        return None if self.use is None else round(self.use.rss_bytes / 1e6, 1)

    @property
    def descriptors(self) -> int | None:
        return None if self.use is None else self.use.descriptors


async def soak(
    target: Target,
    process_id: int | None,
    outstanding: int,
    seconds: float,
    every_s: float,
    stopped: asyncio.Event,
    clock: Clock,
    progress: Callable[[str, str], None],
) -> list[Interval]:
    """Keeps chats outstanding for so many seconds, or until `stopped` is set. Returns one interval for `every_s` seconds.

    The chats of an interval are forgotten at its end, so that this process does not grow itself.
    """
    tls_context()
    load = Load(clock, "soak")
    began, intervals = clock.monotonic(), list[Interval]()
    clients = asyncio.ensure_future(load.closed("tenant", target, CHAT, outstanding, seconds))
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        while not (clients.done() or stopped.is_set()):
            await asyncio.wait({clients, stopping}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            intervals.append(_take_interval(load, clock.monotonic() - began, process_id))
            progress("soak", _line(intervals[-1]))
    finally:
        stopping.cancel()
        clients.cancel()
        results = await asyncio.gather(clients, stopping, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]
    return intervals


def _take_interval(load: Load, until_s: float, process_id: int | None) -> Interval:
    ended = [one for one in load.sent if one.ended_at is not None]
    load.sent[:] = [one for one in load.sent if one.ended_at is None]
    ttft = [one.ttft_s for one in ended if one.ttft_s is not None]
    answered, refused = (sum(one.status in codes for one in ended) for codes in ((200,), (429, 503)))
    return Interval(
        until_s=until_s,
        sent=len(ended) + len(load.sent),
        answered=answered,
        refused=refused,
        failed=len(ended) - answered - refused,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p99=percentile(ttft, 0.99),
        use=None if process_id is None else process_use(process_id),
    )


def _line(one: Interval) -> str:
    memory = "" if one.use is None else f", {one.use.rss_bytes / 1e6:.0f} MB, {one.use.descriptors} descriptors"
    p50 = "–" if one.ttft_p50 is None else f"{1000 * one.ttft_p50:.0f} ms"
    return f"{one.until_s / 60:.1f} min, {one.answered} answered, {one.failed} failed, TTFT p50 {p50}{memory}"


def claims(intervals: Sequence[Interval]) -> list[Claim]:
    """Returns what a soak must show: no failures, no growth and no drift. Undecided if the run was too short."""
    failed = sum(one.failed for one in intervals)
    answered = sum(one.answered for one in intervals)
    found = [Claim("every chat is answered or refused", not failed and answered > 0, f"{failed} of {answered} failed")]
    readings: list[tuple[str, float, list[float | None]]] = [
        ("memory", _MAX_GROWTH, [one.memory_mb for one in intervals]),
        ("descriptors", _MAX_GROWTH, [one.descriptors for one in intervals]),
        ("median TTFT", _MAX_DRIFT, [one.ttft_p50 for one in intervals]),
    ]
    return found + [_growth(name, most, values) for name, most, values in readings if any(values)]


def _growth(name: str, most: float, values: Sequence[float | None]) -> Claim:
    """Compares the medians of the second and the last quarter: the first quarter fills caches."""
    text = f"{name}: the last quarter has at most {most:g} x the second"
    quarter = len(values) // 4
    early = [value for value in values[quarter : 2 * quarter] if value is not None]
    late = [value for value in values[-quarter:] if value is not None] if quarter else []
    if len(values) < _LEAST_INTERVALS or not (early and late):
        return Claim(text, None, f"{len(values)} intervals are too few")
    ratio = (percentile(late, 0.5) or 0.0) / (percentile(early, 0.5) or 1.0)
    return Claim(text, ratio <= most, f"{ratio:.3f}")


def soak_report(server: str, intervals: Sequence[Interval], *, was_stopped: bool) -> Report:
    """Returns the report of all intervals."""
    rows = [
        (
            round(one.until_s / 60, 2),
            one.sent,
            one.answered,
            one.refused,
            one.failed,
            ms(one.ttft_p50),
            ms(one.ttft_p99),
        )
        + ((None, None) if one.use is None else (round(one.use.rss_bytes / 1e6, 1), one.use.descriptors))
        for one in intervals
    ]

    def line(name: str, read: Callable[[Interval], float | None]) -> tuple[str, list[tuple[float, float]]]:
        points = [(one.until_s / 60, read(one)) for one in intervals]
        return name, [(minute, value) for minute, value in points if value is not None]

    charts = [
        Lines(
            "Time to first token",
            "ms",
            "minutes",
            [line("p50", lambda one: ms(one.ttft_p50)), line("p99", lambda one: ms(one.ttft_p99))],
        ),
        Lines("Memory of all processes", "MB", "minutes", [line("resident", lambda one: one.memory_mb)]),
        Lines("Open descriptors", "number", "minutes", [line("all", lambda one: one.descriptors)]),
    ]
    note = f"Server: {server}. {'Stopped early.' if was_stopped else 'Ran to its end.'}"
    body = {"was_stopped": was_stopped, "intervals": [asdict(one) for one in intervals]}
    return Report("Soak", note, _COLUMNS, rows, charts, body, claims(intervals))
