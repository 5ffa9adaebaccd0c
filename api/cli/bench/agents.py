"""Measures agents in sessions: turns that call tools, pauses while a tool runs, and forks that share a past.

Owns the agents and the records of their turns. Needs a Graftwork server: sessions are no part of OpenAI's API.

    agent     a message, a turn that must call a tool, the tool's time, a turn with its result, and so on
    fork      in the middle each agent forks; the branches go on side by side
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from graftwork.api.cli.bench.figures import percentile
from graftwork.api.cli.bench.load import Target
from graftwork.api.cli.bench.page import Claim, Lines
from graftwork.api.cli.bench.report import Report, ms
from graftwork.api.cli.demo.conversation import Turn, listen
from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.session import Session
from graftwork.api.sdk.transport.errors import ConfigurationError, GraftworkError, NotFoundError
from graftwork.api.sdk.transport.runtimes import AsyncRuntime
from graftwork.api.sdk.transport.tools import ToolOutput
from graftwork.platform.clock import Clock

TIERS = ("device", "host", "disk", "recomputed")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up in the archive.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}},
    },
}
_TOOL_SIGMA = 1.0
"""Of the natural logarithm of a tool's seconds: most are near the median, a few take ten times as long."""
_MESSAGE_WORDS, _RESULT_WORDS = 6, 12
_MAX_TOKENS = 96
_COLUMNS = ("turn", "turns", "failed", "TTFT p50 ms", "TTFT p99 ms", "turn p50 ms", *(f"{tier} %" for tier in TIERS))

Show = Callable[[str], None]
"""Shows the state of the measurement in one line."""


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """How many agents there are, and what each does."""

    agents: int = 8
    turns: int = 10
    """Of each agent and of each branch of it, counted from the beginning of the session."""
    branches: int = 2
    """The sessions in which an agent goes on after the middle, itself included; 1 means no fork."""
    tool_s: float = 0.5
    """The median time of a tool, in seconds."""


@dataclass(frozen=True, slots=True)
class NumberedTurn:
    """One turn, and which one of its session it is, from 1. A branch goes on counting where its trunk was."""

    number: int
    turn: Turn


@dataclass(slots=True)
class Agents:
    """The agents of one measurement. All ended turns are in `turns`."""

    plan: AgentPlan
    clock: Clock
    show: Show
    turns: list[NumberedTurn] = field(default_factory=list)

    async def run(self, targets: Sequence[Target]) -> None:
        """Runs all agents to their ends; agent n belongs to the tenant n modulo the number of targets.

        Raises ConfigurationError if the server has no sessions, and a GraftworkError if it refuses them.
        """
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.agents):
                group.create_task(self._agent(number, targets[number % len(targets)]))

    async def _agent(self, number: int, target: Target) -> None:
        async with AsyncGraftwork(target.url, target.key or "none") as client:
            session = await client.sessions.create(
                model=target.model, tools=[TOOL], sampling={"temperature": 0, "max_tokens": _MAX_TOKENS}
            )
            middle = max(self.plan.turns // 2, 1)
            trunk = _Branch(self, session, f"{number}")
            await trunk.go_on(0, middle)
            branches = [trunk]
            if self.plan.branches > 1 and not trunk.has_failed:
                forked = await session.fork(count=self.plan.branches - 1)
                branches += [_Branch(self, one, f"{number}.{index}") for index, one in enumerate(forked)]
                for branch in branches[1:]:
                    branch.calls = list(trunk.calls)
            await asyncio.gather(*(branch.go_on(middle, self.plan.turns) for branch in branches))
            for branch in branches:
                await branch.session.close()

    def record(self, number: int, turn: Turn) -> None:
        self.turns.append(NumberedTurn(number, turn))
        failed = sum(one.turn.failure is not None for one in self.turns)
        self.show(f"{len(self.turns)} turns ended, {failed} failed")


@dataclass(slots=True)
class _Branch:
    """One session of an agent."""

    agents: Agents
    session: Session[AsyncRuntime]
    name: str
    calls: list[str] = field(default_factory=list)
    """The ids of the calls of the last turn, which wait for their outputs."""
    has_failed: bool = False

    async def go_on(self, first: int, end: int) -> None:
        """Runs the turns from `first` to `end`, both from 0. Stops at a turn that fails."""
        for index in range(first, end):
            if self.has_failed:
                return
            noise = Random(f"{self.name} {index}")
            try:
                turn = await self._turn(index, noise)
            except GraftworkError as error:
                now = self.agents.clock.monotonic()
                turn = Turn(now, ended_at=now, failure=error.message)
            self.calls = [call.call_id for call in turn.calls]
            self.has_failed = turn.failure is not None
            self.agents.record(index + 1, turn)

    async def _turn(self, index: int, noise: Random) -> Turn:
        if self.calls:
            await asyncio.sleep(noise.lognormvariate(math.log(self.agents.plan.tool_s), _TOOL_SIGMA))
            outputs = [ToolOutput(call_id, _words(noise, _RESULT_WORDS)) for call_id in self.calls]
            return await listen(self.session.tool_outputs(outputs, stream=True), self.agents.clock)
        message = f"Agent {self.name}, step {index}: {_words(noise, _MESSAGE_WORDS)}"
        return await listen(self.session.turn(message, stream=True, tool_choice="required"), self.agents.clock)


def _words(noise: Random, count: int) -> str:
    return " ".join(
        f"{noise.choice('bdfgklmnprstvz')}{noise.choice('aeiou')}{noise.randrange(100)}" for _ in range(count)
    )


async def check_sessions(target: Target) -> None:
    """Checks that a server has sessions. Raises ConfigurationError if it has none."""
    async with AsyncGraftwork(target.url, target.key or "none") as client:
        try:
            await client.sessions.list(limit=1)
        except NotFoundError as error:
            raise ConfigurationError(
                f"{target.url} has no /v1/sessions: `graftwork bench sessions` measures Graftwork servers alone. "
                "For others there is `graftwork bench throughput --url`."
            ) from error


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The turns of one number. Times are in seconds; a figure without samples is None."""

    number: int
    turns: int
    failed: int
    ttft_p50: float | None
    ttft_p99: float | None
    turn_p50: float | None
    shares: dict[str, float]
    """The fraction of the prompt's tokens by tier whose KV was cached there, and `recomputed`; they add up to 1."""


def turn_figures(turns: Sequence[NumberedTurn]) -> list[TurnFigures]:
    """Returns the figures of the turns by their number."""
    numbers = sorted({one.number for one in turns})
    return [_figures_of(number, [one.turn for one in turns if one.number == number]) for number in numbers]


def _figures_of(number: int, turns: Sequence[Turn]) -> TurnFigures:
    good = [one for one in turns if one.failure is None]
    ttft = [wait for one in good if (wait := one.ttft_s) is not None]
    whole = [one.ended_at - one.started_at for one in good if one.ended_at is not None]
    tokens = {
        tier: sum(getattr(one.cache, f"{tier}_tokens") for one in good if one.cache is not None) for tier in TIERS
    }
    total = sum(tokens.values())
    shares = {tier: count / total if total else 0.0 for tier, count in tokens.items()}
    figures = TurnFigures(number, len(turns), len(turns) - len(good), None, None, percentile(whole, 0.5), shares)
    return replace(figures, ttft_p50=percentile(ttft, 0.5), ttft_p99=percentile(ttft, 0.99))


def agents_report(server: str, agents: Agents) -> Report:
    """Returns the report of the turns by their number."""
    figures = turn_figures(agents.turns)
    rows = [
        (
            *(one.number, one.turns, one.failed),
            *map(ms, (one.ttft_p50, one.ttft_p99, one.turn_p50)),
            *(round(100 * one.shares[tier], 1) for tier in TIERS),
        )
        for one in figures
    ]

    def line(name: str, values: Sequence[float | None]) -> tuple[str, list[tuple[float, float]]]:
        points = zip(figures, values, strict=True)
        return name, [(float(one.number), value) for one, value in points if value is not None]

    charts = [
        Lines(
            "Time of a turn",
            "ms",
            "turn of the session",
            [
                line("first token, p50", [ms(one.ttft_p50) for one in figures]),
                line("first token, p99", [ms(one.ttft_p99) for one in figures]),
                line("whole turn, p50", [ms(one.turn_p50) for one in figures]),
            ],
        ),
        Lines(
            "Where the KV of the prompt was",
            "% of its tokens",
            "turn of the session",
            [line(tier, [100 * one.shares[tier] for one in figures]) for tier in TIERS],
        ),
    ]
    plan = agents.plan
    note = f"Server: {server}. {plan.agents} agents, {plan.turns} turns, {plan.branches} branches from the middle."
    body: dict[str, Any] = {"turns": [asdict(one) for one in figures]}
    return Report("Agents in sessions", note, _COLUMNS, rows, charts, body, [_no_failure(agents.turns)])


def _no_failure(turns: Sequence[NumberedTurn]) -> Claim:
    failures = [one for one in turns if one.turn.failure is not None]
    found = f"{len(turns)} turns" if not failures else f"turn {failures[0].number}: {failures[0].turn.failure}"
    return Claim("no turn fails", bool(turns) and not failures, found)
