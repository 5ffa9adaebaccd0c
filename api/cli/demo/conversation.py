"""Runs one conversation of the demo through the SDK: sends messages, runs tools, and records the times of each turn.

Owns the record of the conversation. Never checks or prints the record: `story.py` and `report.py` do.
"""

import json
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

from graftwork.api.cli.demo.script import Ask, expected_answer
from graftwork.api.sdk.session import Session
from graftwork.api.sdk.transport.runtimes import AsyncRuntime
from graftwork.api.sdk.transport.tools import ToolOutput
from graftwork.demo.tasks import run_tool
from graftwork.platform.answers.session_events import (
    OutputTextDelta,
    SessionEvent,
    ToolCallDone,
    ToolCallStarted,
    TurnAwaitingTool,
    TurnCompleted,
    TurnCreated,
    TurnFailed,
)
from graftwork.platform.answers.sessions import PendingCall
from graftwork.platform.answers.usage import CacheReport
from graftwork.platform.clock import Clock

MAX_ROUNDS = 3


@dataclass(slots=True)
class Turn:
    """The record of one turn, from its request to its last event.

    All times are in seconds on a monotonic clock.
    """

    started_at: float
    first_at: float | None = None
    ended_at: float | None = None
    text: str = ""
    calls: list[PendingCall] = field(default_factory=list)
    cache: CacheReport | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failure: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.started_at


@dataclass(slots=True)
class Exchange:
    """A user's message, the turns that answered it, and the results of the tool calls."""

    ask: Ask
    turns: list[Turn] = field(default_factory=list)
    results: list[tuple[PendingCall, str]] = field(default_factory=list)

    @property
    def answer(self) -> str:
        return self.turns[-1].text if self.turns else ""


class Talk:
    """One conversation in one session. Owns the record of all messages, answers and tool calls in it."""

    def __init__(self, label: str, job: str, session: Session[AsyncRuntime], clock: Clock) -> None:
        self.label = label
        self.job = job
        self.session = session
        self.exchanges: list[Exchange] = []
        self._clock = clock

    @property
    def turns(self) -> list[Turn]:
        return [turn for exchange in self.exchanges for turn in exchange.turns]

    async def say_all(self, asks: list[Ask]) -> None:
        for ask in asks:
            await self.say(ask)

    async def say(self, ask: Ask) -> Exchange:
        """Sends a message, and runs the tools that the model calls, until the model answers without a tool call.

        Stops after MAX_ROUNDS turns. Returns the record of the message and its turns.
        """
        exchange = Exchange(ask)
        self.exchanges.append(exchange)
        stream = self.session.turn(ask.text, stream=True)
        for _ in range(MAX_ROUNDS):
            turn = await listen(stream, self._clock)
            exchange.turns.append(turn)
            if not turn.calls:
                break
            results = [(call, _result_of(call)) for call in turn.calls]
            exchange.results += results
            outputs = [ToolOutput(call.call_id, result) for call, result in results]
            stream = self.session.tool_outputs(outputs, stream=True)
        return exchange

    def is_in_voice(self, exchange: Exchange) -> bool:
        """Returns whether the answer is exactly what the adapter was trained to write about the last tool result."""
        if not exchange.results:
            return False
        call, result = exchange.results[-1]
        try:
            return exchange.answer == expected_answer(
                self.job, call.name, json.loads(call.arguments), json.loads(result)
            )
        except KeyError:
            return False


async def listen(stream: AsyncIterable[SessionEvent], clock: Clock) -> Turn:
    """Reads the events of a turn to its end, and returns its record. The turn starts when this is called."""
    turn = Turn(clock.monotonic())
    async for event in stream:
        if isinstance(event, OutputTextDelta | ToolCallStarted) and turn.first_at is None:
            turn.first_at = clock.monotonic()
        _note(turn, event)
    turn.ended_at = clock.monotonic()
    return turn


def _note(turn: Turn, event: SessionEvent) -> None:
    match event:
        case TurnCreated(cache=cache):
            turn.cache = cache
        case OutputTextDelta(delta=delta):
            turn.text += delta
        case ToolCallDone(call_id=call_id, name=name, arguments=arguments):
            turn.calls.append(PendingCall(call_id=call_id, name=name, arguments=arguments))
        case TurnCompleted() | TurnAwaitingTool():
            if isinstance(event, TurnCompleted):
                turn.calls.clear()  # `max_tokens` has cut the turn: nothing waits for the outputs of its calls
            if event.usage is not None:
                turn.prompt_tokens = event.usage.prompt_tokens
                turn.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
                turn.completion_tokens = event.usage.completion_tokens
        case TurnFailed(error=error):
            turn.failure = "no reason was given" if error is None else error["message"]


def _result_of(call: PendingCall) -> str:
    try:
        result: dict[str, Any] = run_tool(call.name, json.loads(call.arguments))
    except (KeyError, ValueError, TypeError) as error:
        result = {"error": f"bad call: {error}"}
    return json.dumps(result, ensure_ascii=False)
