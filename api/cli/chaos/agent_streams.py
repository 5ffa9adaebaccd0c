"""Defines a client that streams the turns of its sessions, leaves streams in the middle, and reads on elsewhere.

Owns the record of all events that a client got, and when. The record is compared with the server's in verdicts.py.

    POST turns (stream) ──► events 1 … n ──(cut, or the client leaves)──► GET events?after=n at any gateway ──► …
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from graftwork.api.cli.chaos.fleet_clients import (
    ATTEMPT_S,
    FINAL_409,
    PAUSE_S,
    RETRIED,
    SessionClient,
    WrongAnswer,
    refuse,
)

_LEAVES = 0.2
"""The part of the streams that the client leaves in the middle."""
_LEAVES_WITHIN = 12
"""After how many events, at most, it leaves."""
_ENDS = frozenset({"turn.completed", "turn.failed", "turn.cancelled"})
_TOOL_S = 1.0
"""The mean of the seconds between two turns, in which a tool of the agent runs."""

Event = tuple[int, str, str, str]
"""The number, the type and the text of an event, and the id of its turn."""


@dataclass
class StreamedTurn:
    """One turn as its client saw it."""

    turn_id: str = ""
    times: list[float] = field(default_factory=list)
    """When each event came, on the monotonic clock."""
    last: dict[str, Any] = field(default_factory=dict)
    """The last event; empty while the turn runs."""
    text: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    """Where the tokens of the prompt were: counts by tier. Empty before the engine has accepted the prompt."""

    @property
    def longest_pause_s(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass
class StreamingAgent(SessionClient):
    """Holds one session after another, by streams."""

    turns: list[StreamedTurn] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    """By session: the events in the order in which they came."""
    out_of_order: list[str] = field(default_factory=list)
    """What was wrong with an event's number."""
    num_reconnects: int = 0
    leaves: float = _LEAVES
    """The part of the streams that the client leaves in the middle."""

    async def act(self) -> None:
        await super().act()
        await asyncio.sleep(self.luck.expovariate(1 / _TOOL_S))

    async def take_turn(self, text: str, key: str) -> bool:
        """Streams one turn to its end. Returns False if the server failed it."""
        turn = StreamedTurn()
        self.turns.append(turn)
        leaves_after = self.luck.randrange(1, _LEAVES_WITHIN) if self.luck.random() < self.leaves else None
        while not turn.last:
            try:
                await self._read_on(turn, text, key, leaves_after)
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
            leaves_after = None
        if turn.last["type"] != "turn.completed":
            self.failed.add(turn.turn_id)
            return False
        if turn.turn_id in self.completed:
            raise WrongAnswer(f"two idempotency keys got one turn: {turn.last}")
        self.completed[turn.turn_id] = turn.last["usage"]
        self.said[self.session_id] += [("user", text), ("assistant", turn.text)]
        return True

    async def _read_on(self, turn: StreamedTurn, text: str, key: str, leaves_after: int | None) -> None:
        """Asks a gateway for the turn, or for the events after the last that came, and reads until the stream ends."""
        path, seen = f"{self.url()}/v1/sessions/{self.session_id}", self._seen
        if turn.turn_id:
            self.num_reconnects += 1
            asked = self.http.stream("GET", f"{path}/events?after={seen}", timeout=ATTEMPT_S)
        else:
            body = {"input": text, "stream": True}
            headers = {"idempotency-key": key}
            asked = self.http.stream("POST", f"{path}/turns", json=body, headers=headers, timeout=ATTEMPT_S)
        async with asked as answer:
            if answer.status_code != 200:
                await answer.aread()
                code = answer.json().get("error", {}).get("code")
                if answer.status_code not in RETRIED or code in FINAL_409:
                    refuse(answer)
                self.num_refused += 1
                await asyncio.sleep(PAUSE_S)
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self._take(turn, json.loads(line.removeprefix("data: ")))
                    if leaves_after is not None and len(turn.times) >= leaves_after:
                        return
        if not turn.last:  # the events so far were sent, and the turn runs at another gateway
            await asyncio.sleep(PAUSE_S)

    @property
    def _seen(self) -> int:
        events = self.events.setdefault(self.session_id, [])
        return events[-1][0] if events else 0

    def _take(self, turn: StreamedTurn, event: dict[str, Any]) -> None:
        """Records an event of the stream. Pings have no number."""
        if "seq" not in event:
            return  # a ping, or an error of the stream and not of the turn: the client reads on elsewhere
        number, seen = event["seq"], self._seen
        is_first = not turn.turn_id  # before it there may be a turn that has failed without this client
        if number <= seen or (number > seen + 1 and not is_first):
            self.out_of_order.append(f"{self.session_id}: event {number} came after event {seen}")
        self.events[self.session_id].append(_event(event))
        turn.turn_id = turn.turn_id or event["turn_id"]
        if event["turn_id"] != turn.turn_id:
            raise WrongAnswer(f"an event of another turn than {turn.turn_id}: {event}")
        turn.times.append(time.monotonic())
        turn.text += event.get("delta", "")
        turn.cache = event.get("cache") or turn.cache
        if event["type"] in _ENDS:
            turn.last = event

    async def stored_events(self, session_id: str) -> list[Event]:
        """Reads all events that the server has of a session."""
        while True:
            url = f"{self.url()}/v1/sessions/{session_id}/events"
            try:
                async with self.http.stream("GET", url, timeout=ATTEMPT_S) as answer:
                    data = [
                        line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")
                    ]
                    if answer.status_code == 200:
                        return [_event(event) for event in map(json.loads, data) if "seq" in event]
            except httpx.TransportError:
                pass
            await asyncio.sleep(PAUSE_S)


def _event(event: dict[str, Any]) -> Event:
    return event["seq"], event["type"], event.get("delta", ""), event["turn_id"]
