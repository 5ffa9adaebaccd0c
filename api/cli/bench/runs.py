"""Runs the measurements of `graftwork bench` against a server: throughput, and fairness under a flood.

Owns the phases and what is checked. A phase ends after its time: chats that have no answer by then are given up.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftwork.api.cli.bench.figures import TenantFigures, contended_jain, tenant_figures, tokens_within
from graftwork.api.cli.bench.load import ChatShape, Load, Target, arrivals, tls_context
from graftwork.api.cli.bench.page import Claim
from graftwork.platform.clock import Clock

STORY = ChatShape(words=30, max_tokens=64)
QUESTION = ChatShape(words=10, max_tokens=8)
AGENT = ChatShape(words=20, max_tokens=24)
_AGENT_TURNS, _AGENT_PAUSE_S = 6, 0.5
_LIGHT_PER_S = 0.5
_FLOOD_FACTOR = 3.0
_REST_S = 1.0
"""Between phases, so that the requests which were given up are gone."""

LIGHT = ("light-1", "light-2")
FLOOD, AGENTS = "flood", "agents"
TENANTS = (FLOOD, *LIGHT, AGENTS)

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
    chats_per_s: float
    """The arrived pieces, in answers of the mean length of those that ended: unlike a count of ended answers, this does not
    depend on how many the end of the phase cuts off. 0 if no answer ended.
    """
    jain: float | None
    """Of the tenants that waited all through windows of some seconds; None if never two did."""

    def ttft_p99(self, tenant: str) -> float | None:
        """Returns the p99 of a tenant's times to first token, in seconds; None if the tenant got no token."""
        return next((one.ttft_p99 for one in self.tenants if one.tenant == tenant), None)


async def run_phase(name: str, clients: Clients, seconds: float, clock: Clock, progress: Progress) -> Phase:
    """Runs the clients for so many seconds, and returns what they saw."""
    load = Load(clock, lambda load: progress(name, load))
    tls_context()
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
    lengths = [len(one.token_times) for one in load.sent if one.ended_at is not None and one.token_times]
    tokens_per_s = tokens_within(load.sent, began, ends_at) / seconds
    return Phase(
        name=name,
        seconds=seconds,
        tenants=tuple(tenant_figures(load.sent, seconds)),
        tokens_per_s=tokens_per_s,
        chats_per_s=tokens_per_s * len(lengths) / sum(lengths) if lengths else 0.0,
        jain=contended_jain(load.sent, began, ends_at),
    )


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


async def capacity(target: Target, outstanding: int, seconds: float, clock: Clock, progress: Progress) -> float:
    """Returns how many of the flood's chats the server answers in a second, with so many outstanding."""
    phase = await run_phase(
        "capacity", lambda load: [load.closed(FLOOD, target, STORY, outstanding, seconds)], seconds, clock, progress
    )
    return max(phase.chats_per_s, 1 / seconds)


def everybody(targets: Mapping[str, Target], flood_per_s: float, seconds: float) -> Clients:
    """Returns the clients of the flood: the same arrivals each time."""

    def clients(load: Load) -> list[Coroutine[Any, Any, None]]:
        flood = load.open(FLOOD, targets[FLOOD], STORY, arrivals(flood_per_s, seconds, FLOOD))
        return [flood, *_quiet(targets, seconds)(load)]

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


async def solo_phases(
    targets: Mapping[str, Target], seconds: float, clock: Clock, progress: Progress
) -> dict[str, Phase]:
    """Measures each light tenant, and the agents, alone."""
    phases = {}
    for name in (*LIGHT, AGENTS):
        clients = _quiet(targets, seconds, only=name)
        phases[name] = await run_phase(f"{name} alone", clients, seconds, clock, progress)
        await asyncio.sleep(_REST_S)
    return phases


@dataclass(frozen=True, slots=True)
class Fairness:
    """The phases of the fairness measurement."""

    capacity_per_s: float
    solo: dict[str, Phase]
    flood: Phase
    """Everybody, under the policy of the server."""
    baseline: Phase | None = None
    """The same arrivals, first come first served; None if that was not measured."""

    async def with_baseline(self, targets: Mapping[str, Target], clock: Clock, progress: Progress) -> "Fairness":
        """Measures the same arrivals against the tenants of another server, which serves first come first served."""
        seconds = self.flood.seconds
        clients = everybody(targets, _FLOOD_FACTOR * self.capacity_per_s, seconds)
        name = "flood, first come first served"
        return replace(self, baseline=await run_phase(name, clients, seconds, clock, progress))


async def fairness(
    targets: Mapping[str, Target], seconds: float, outstanding: int, clock: Clock, progress: Progress
) -> Fairness:
    """Measures a flood at three times the capacity beside two light tenants and one of agents, and these alone."""
    per_s = await capacity(targets[FLOOD], outstanding, seconds, clock, progress)
    await asyncio.sleep(_REST_S)
    solo = await solo_phases(targets, seconds, clock, progress)
    clients = everybody(targets, _FLOOD_FACTOR * per_s, seconds)
    return Fairness(per_s, solo, await run_phase("flood", clients, seconds, clock, progress))


def claims(found: Fairness) -> list[Claim]:
    """Returns what `graftwork bench fairness` promises, and whether it held."""
    results = []
    for name in LIGHT:
        alone, beside = found.solo[name].ttft_p99(name), found.flood.ttft_p99(name)
        holds = alone is not None and beside is not None and beside <= 2 * alone
        results.append(
            Claim(
                f"{name}: p99 TTFT beside the flood is at most 2 x alone", holds, f"{_ms(beside)} against {_ms(alone)}"
            )
        )
    if found.flood.jain is not None:
        jain = found.flood.jain
        results.append(Claim("Jain's index of those who wait is at least 0.95", jain >= 0.95, f"{jain:.3f}"))
    if found.baseline is not None:
        ratio = found.flood.tokens_per_s / max(found.baseline.tokens_per_s, 1e-9)
        results.append(Claim("throughput is at least 0.97 x first come first served", ratio >= 0.97, f"{ratio:.3f}"))
    return results


def _ms(seconds: float | None) -> str:
    return "no answer" if seconds is None else f"{1000 * seconds:.0f} ms"
