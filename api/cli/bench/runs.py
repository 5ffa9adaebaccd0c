"""Runs the measurements of `graftwork bench` against a server: throughput, and fairness under a flood.

Owns the phases and what is checked. A phase ends after its time: chats that have no answer by then are given up.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from graftwork.api.cli.bench.figures import (
    TenantFigures,
    Window,
    computed_within,
    contended_jain,
    tenant_figures,
    tokens_within,
)
from graftwork.api.cli.bench.load import ChatShape, Load, Target, arrivals
from graftwork.api.cli.bench.page import Claim
from graftwork.api.cli.bench.stream_client import tls_context
from graftwork.platform.clock import Clock
from graftwork.platform.cores import last_core

STORY = ChatShape(words=30, max_tokens=64)
QUESTION = ChatShape(words=10, max_tokens=8)
AGENT = ChatShape(words=20, max_tokens=24)
_AGENT_TURNS, _AGENT_PAUSE_S = 6, 0.5
_LIGHT_PER_S = 2.0
"""So a light tenant has enough answers for a p99 in a phase of a minute."""
_P99_ANSWERS = 100
"""The fewest answers for which the p99 is not simply the largest value."""
_FLOOD_FACTOR, _CROWD_FACTOR = 3.0, 1.2
"""What the two heavy tenants send, in capacities of the server. Two thirds of one are the most that the crowd gets."""
_REST_S = 1.0
"""Between phases, so that the requests which were given up are gone."""
_FEWEST_TURNS, _TURN_S = 3, 10.0
"""The windows of each phase of the fairness measurement: one for every ten seconds. In longer ones, a shared machine changes
its pace within a pair of them by more than the two orders differ.
"""

LIGHT = ("light-1", "light-2")
FLOOD, CROWD, AGENTS = "flood", "crowd", "agents"
TENANTS = {FLOOD: 1.0, CROWD: 2.0, **dict.fromkeys(LIGHT, 1.0), AGENTS: 1.0}
"""The weight of each tenant. Flood and crowd send more than their shares, so their service can be compared."""

SETTINGS = {"max_running": "16", "target_itl_ms": "12"}
"""The settings of the demo server under the flood, and of the one that serves first come first served.

A light request waits for the step that runs when it comes, and for its own. A CPU computes a step of 64 requests in
about the time of 64 steps of one, so no order could keep the time to a first token near that of an idle server.
"""


def flood_settings() -> dict[str, str]:
    """Returns `SETTINGS`, and a core for the engine alone where there are two: without it, clients and gateway take a quarter
    of the engine's time.
    """
    core = last_core()
    return SETTINGS if core is None else SETTINGS | {"engine_cores": str(core)}


Progress = Callable[[str, Load], None]
"""Shows how far a phase has come; gets its name and its load."""
Clients = Callable[[Load], list[Coroutine[Any, Any, None]]]


@dataclass(frozen=True, slots=True)
class Phase:
    """The figures of one phase."""

    name: str
    seconds: float
    tenants: tuple[TenantFigures, ...]
    tokens_per_s: float
    """Pieces of answers that arrived, of all tenants."""
    computed_per_s: float
    """The same with the tokens of prompts that were computed."""
    chats_per_s: float
    """The arrived pieces, in answers of the mean length of those that ended: unlike a count of ended answers, this does not
    depend on how many the end of the phase cuts off. 0 if no answer ended.
    """
    jain: float | None
    """Of the tenants that waited all through windows of some seconds; None if never two did."""

    def of(self, tenant: str) -> TenantFigures | None:
        """Returns the figures of a tenant; None if it sent nothing."""
        return next((one for one in self.tenants if one.tenant == tenant), None)


async def run_phase(name: str, clients: Clients, seconds: float, clock: Clock, progress: Progress) -> Phase:
    """Runs the clients for so many seconds, and returns what they saw."""
    return phase_of(name, [await run_window(name, clients, seconds, clock, progress)])


async def run_window(
    name: str, clients: Clients, seconds: float, clock: Clock, progress: Progress, topic: str | None = None
) -> Window:
    """Runs the clients for so many seconds, and returns what they sent. Their questions are those of the phase's name,
    unless they have another `topic`.
    """
    load = Load(clock, name if topic is None else topic, lambda load: progress(name, load))
    tls_context()
    with _no_collections():
        began = clock.monotonic()
        tasks = [asyncio.ensure_future(client) for client in clients(load)]
        _, waiting = await asyncio.wait(tasks, timeout=seconds)
        ends_at = began + seconds
        await asyncio.sleep(max(ends_at - clock.monotonic(), 0.0))
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return Window(load.sent, began, ends_at)


def phase_of(name: str, windows: Sequence[Window]) -> Phase:
    """Returns the figures of a phase that ran in one or several windows of time."""
    seconds = sum(window.seconds for window in windows)
    sent = [one for window in windows for one in window.sent]
    lengths = [len(one.token_times) for one in sent if one.ended_at is not None and one.token_times]
    tokens_per_s = sum(tokens_within(window.sent, window.start, window.end) for window in windows) / seconds
    indices = [contended_jain(window.sent, window.start, window.end) for window in windows]
    known = [index for index in indices if index is not None]
    return Phase(
        name=name,
        seconds=seconds,
        tenants=tuple(tenant_figures(windows)),
        tokens_per_s=tokens_per_s,
        computed_per_s=sum(computed_within(window.sent, window.start, window.end) for window in windows) / seconds,
        chats_per_s=tokens_per_s * len(lengths) / sum(lengths) if lengths else 0.0,
        jain=fmean(known) if known else None,
    )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps Python's garbage collector off until the end of the block: with 900 chats it stops the clients for 60 ms, which
    would count as the server's.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def throughput(
    target: Target, levels: tuple[int, ...], seconds: float, clock: Clock, progress: Progress
) -> list[Phase]:
    """Measures one tenant with 1, 2, 4, … chats outstanding: `levels`, each for so many seconds."""
    phases = []
    for level in levels:
        phases.append(
            await run_phase(
                f"{level} outstanding",
                lambda load, level=level: [load.closed("tenant", target, STORY, level, seconds)],  # type: ignore[misc]
                seconds,
                clock,
                progress,
            )
        )
        await asyncio.sleep(_REST_S)
    return phases


async def capacity(
    target: Target, outstanding: int, seconds: float, clock: Clock, progress: Progress, shape: ChatShape = STORY
) -> float:
    """Returns how many chats of a shape the server answers in a second, with so many outstanding."""
    phase = await run_phase(
        "capacity", lambda load: [load.closed(FLOOD, target, shape, outstanding, seconds)], seconds, clock, progress
    )
    return max(phase.chats_per_s, 1 / seconds)


def everybody(targets: Mapping[str, Target], capacity_per_s: float, seconds: float) -> Clients:
    """Returns the clients of the flood: the same arrivals each time."""

    def clients(load: Load) -> list[Coroutine[Any, Any, None]]:
        heavy = [
            load.open(name, targets[name], STORY, arrivals(factor * capacity_per_s, seconds, name))
            for name, factor in ((FLOOD, _FLOOD_FACTOR), (CROWD, _CROWD_FACTOR))
        ]
        return [*heavy, *_quiet(targets, seconds)(load)]

    return clients


def _quiet(targets: Mapping[str, Target], seconds: float, only: str | None = None) -> Clients:
    """Returns the clients beside the flood, or only those of one tenant."""

    def clients(load: Load) -> list[Coroutine[Any, Any, None]]:
        found = [
            load.open(name, targets[name], QUESTION, arrivals(_LIGHT_PER_S, seconds, name))
            for name in LIGHT
            if only in (None, name)
        ]
        if only in (None, AGENTS):
            found.append(load.agent(AGENTS, targets[AGENTS], AGENT, _AGENT_TURNS, _AGENT_PAUSE_S, seconds))
        return found

    return clients


@dataclass(frozen=True, slots=True)
class Fairness:
    """The phases of the fairness measurement."""

    capacity_per_s: float
    solo: dict[str, Phase]
    flood: Phase
    """Everybody, under the policy of the server."""
    baseline: Phase | None = None
    """The same arrivals, first come first served; None if that was not measured."""
    ratios: tuple[float, ...] = ()
    """What was computed in each turn, over what was computed first come first served right after it."""


async def fairness(
    targets: Mapping[str, Target],
    first_come: Mapping[str, Target] | None,
    seconds: float,
    outstanding: int,
    clock: Clock,
    progress: Progress,
) -> Fairness:
    """Measures a flood at three times the capacity and a crowd of twice its weight beside two light tenants and one of agents,
    and these alone.

    `first_come` are the tenants of another server, which serves first come first served; it gets the same arrivals, and
    before them the same load as the first, so that both have learned their costs and filled their caches. All phases take
    turns, in windows of about ten seconds, and the two servers turns in going first, so a machine that slows down meanwhile
    does so for all of them.
    """
    num_turns = max(_FEWEST_TURNS, round(seconds / _TURN_S))
    window_s = seconds / num_turns
    per_s = await capacity(targets[FLOOD], outstanding, seconds, clock, progress)
    if first_come is not None:
        await capacity(first_come[FLOOD], outstanding, seconds, clock, progress)
    names = [f"{name} alone" for name in (*LIGHT, AGENTS)] + ["flood", "flood, first come first served"]
    windows: dict[str, list[Window]] = {name: [] for name in names}

    async def run(name: str, clients: Clients, topic: str) -> None:
        await asyncio.sleep(_REST_S)
        windows[name].append(await run_window(name, clients, window_s, clock, progress, topic))

    for turn in range(num_turns):
        for tenant in (*LIGHT, AGENTS):
            await run(f"{tenant} alone", _quiet(targets, window_s, only=tenant), f"{tenant} alone {turn}")
        floods = [("flood", targets)] + ([(names[-1], first_come)] if first_come is not None else [])
        for name, tenants in floods if turn % 2 == 0 else reversed(floods):
            await run(name, everybody(tenants, per_s, window_s), f"flood {turn}")
    solo = {tenant: phase_of(f"{tenant} alone", windows[f"{tenant} alone"]) for tenant in (*LIGHT, AGENTS)}
    if first_come is None:
        return Fairness(per_s, solo, phase_of("flood", windows["flood"]))
    own, other = windows["flood"], windows[names[-1]]
    ratios = tuple(
        computed_within(one.sent, one.start, one.end)
        / max(computed_within(beside.sent, beside.start, beside.end), 1e-9)
        for one, beside in zip(own, other, strict=True)
    )
    return Fairness(per_s, solo, phase_of("flood", own), phase_of(names[-1], other), ratios)


def claims(found: Fairness) -> list[Claim]:
    """Returns what `graftwork bench fairness` promises, and whether it held."""
    results = [_light_claim(name, found.solo[name].of(name), found.flood.of(name)) for name in LIGHT]
    jain, text = found.flood.jain, "Jain's index of those who wait is at least 0.95"
    waiting = "no two tenants waited all through a window" if jain is None else f"{jain:.3f}"
    results.append(Claim(text, None if jain is None else jain >= 0.95, waiting))
    if found.baseline is not None:
        ratio = median(found.ratios)
        answers = found.flood.tokens_per_s / max(found.baseline.tokens_per_s, 1e-9)
        text = "throughput, of prompts and answers, is at least 0.97 x first come first served"
        turns = ", ".join(f"{one:.3f}" for one in found.ratios)
        results.append(
            Claim(text, ratio >= 0.97, f"{ratio:.3f}, the median of {turns}; of answers alone {answers:.3f}")
        )
    return results


def _light_claim(name: str, alone: TenantFigures | None, beside: TenantFigures | None) -> Claim:
    text = f"{name}: p99 TTFT beside the flood is at most 2 x alone, and nothing is refused"
    if alone is None or beside is None or alone.ttft_p99 is None or beside.ttft_p99 is None:
        return Claim(text, False, "no answer")
    holds: bool | None = beside.ttft_p99 <= 2 * alone.ttft_p99 and not beside.refused + beside.failed
    fewest = min(alone.sent, beside.sent)
    if fewest < _P99_ANSWERS and holds:
        holds = None
    found = f"{1000 * beside.ttft_p99:.0f} ms against {1000 * alone.ttft_p99:.0f} ms, {beside.refused} refused"
    return Claim(text, holds, f"{found}, of at least {fewest} chats")
