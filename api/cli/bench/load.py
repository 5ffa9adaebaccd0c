"""Sends streamed chats to an OpenAI-compatible server, and notes when their tokens arrive.

Owns the clients of one measured phase. Never judges the figures: figures.py does.

    arrivals     when an open stream of chats sends, whether earlier ones are answered or not (Poisson)
    Load.open    sends at given times
    Load.closed  keeps a number of chats outstanding
    Load.agent   one conversation after another, each turn after the last answer and a pause
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from graftwork.api.cli.bench.stream_client import BrokenAnswer, StreamClient
from graftwork.platform.clock import Clock

_DONE = b"data: [DONE]"
_WORDS = (
    "harbour",
    "ledger",
    "seven",
    "window",
    "copper",
    "before",
    "letter",
    "garden",
    "under",
    "signal",
    "winter",
    "answer",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where chats are sent, and under which key."""

    url: str
    """Without the `/v1`."""
    key: str
    model: str
    deadline_ms: int | None = None
    """Sent as `x-deadline-ms`; None sends no deadline."""
    weight: float = 1.0
    """Of the tenant, where the server knows one."""


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What one chat asks for."""

    words: int = 30
    """The words of the question: a few tokens each."""
    max_tokens: int = 32

    def question(self, topic: str, number: int) -> str:
        """Returns a question that no other topic and number have, and that begins like no other: no KV of it is cached."""
        words = Random(f"{topic} {number}").choices(_WORDS, k=self.words)
        return f"{number} of {topic}: " + " ".join(words)


@dataclass(slots=True)
class Sent:
    """One chat, as its client saw it. Times are those of the clock of the load, in seconds."""

    tenant: str
    sent_at: float
    status: int | None = None
    """None if the connection failed, or if the stream ended without its last event."""
    token_times: list[float] = field(default_factory=list)
    """When each piece of the answer arrived; a piece is usually one token."""
    ended_at: float | None = None
    """None if the phase ended first."""
    completion_tokens: int | None = None
    """As the server counts them; None if it did not say."""
    weight: float = 1.0
    """Of the tenant."""
    computed_tokens: int | None = None
    """The tokens of the prompt that were not cached, as the server counts them; None if it did not say."""

    is_complete: bool = False
    """Whether the stream came to its end, `[DONE]`."""

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def num_tokens(self) -> int:
        """The generated tokens: as the server counts them, else the pieces that arrived."""
        return len(self.token_times) if self.completion_tokens is None else self.completion_tokens


def arrivals(per_s: float, seconds: float, seed: str) -> list[float]:
    """Returns the times of a Poisson stream within `seconds`. The same seed gives the same times."""
    noise, at, times = Random(seed), 0.0, []
    while (at := at + noise.expovariate(per_s)) < seconds:
        times.append(at)
    return times


class Load:
    """The clients of one phase. All chats that they sent are in `sent`."""

    def __init__(self, clock: Clock, topic: str = "", on_change: Callable[["Load"], None] = lambda load: None) -> None:
        """Loads of one `topic` ask the same questions. `on_change` is called whenever a chat is sent or has ended."""
        self._clock = clock
        self._topic = topic
        self._on_change = on_change
        self.sent: list[Sent] = []

    async def open(self, tenant: str, target: Target, shape: ChatShape, times: Iterable[float]) -> None:
        """Sends one chat at each time, in seconds from now. Returns when all have ended."""
        began = self._clock.monotonic()
        async with _client(target) as http, asyncio.TaskGroup() as chats:
            for number, at in enumerate(times):
                await asyncio.sleep(max(began + at - self._clock.monotonic(), 0.0))
                messages = [{"role": "user", "content": shape.question(f"{self._topic} {tenant}", number)}]
                chats.create_task(self._chat(http, tenant, target, messages, shape.max_tokens))

    async def closed(self, tenant: str, target: Target, shape: ChatShape, outstanding: int, seconds: float) -> None:
        """Keeps so many chats outstanding for so long. A refused client waits as long as the server asks it to."""
        ends_at = self._clock.monotonic() + seconds

        async def loop(lane: int) -> None:
            number = lane
            while self._clock.monotonic() < ends_at:
                messages = [{"role": "user", "content": shape.question(f"{self._topic} {tenant}", number)}]
                _, retry_after_s = await self._chat(http, tenant, target, messages, shape.max_tokens)
                number += outstanding
                await asyncio.sleep(retry_after_s)

        async with _client(target) as http, asyncio.TaskGroup() as lanes:
            for lane in range(outstanding):
                lanes.create_task(loop(lane))

    async def agent(
        self, tenant: str, target: Target, shape: ChatShape, turns: int, pause_s: float, seconds: float
    ) -> None:
        """Talks in conversations of `turns` turns, whose prompts grow, with a pause before each turn, for so long."""
        ends_at, number = self._clock.monotonic() + seconds, 0
        async with _client(target) as http:
            while self._clock.monotonic() < ends_at:
                messages: list[dict[str, str]] = []
                for _ in range(turns):
                    if self._clock.monotonic() >= ends_at:
                        return
                    messages.append({"role": "user", "content": shape.question(f"{self._topic} {tenant}", number)})
                    answer, retry_after_s = await self._chat(http, tenant, target, messages, shape.max_tokens)
                    messages.append({"role": "assistant", "content": answer or "-"})
                    number += 1
                    await asyncio.sleep(max(pause_s, retry_after_s))

    async def _chat(
        self,
        http: StreamClient,
        tenant: str,
        target: Target,
        messages: Sequence[dict[str, str]],
        max_tokens: int,
    ) -> tuple[str, float]:
        """Sends one chat. Returns its answer, and the seconds after which a refused client may send again."""
        body: dict[str, Any] = {
            "model": target.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        one = Sent(tenant, self._clock.monotonic(), weight=target.weight)
        self.sent.append(one)
        self._on_change(self)
        pieces: list[str] = []
        retry_after_s = 0.0
        try:
            async with http.post("/v1/chat/completions", json.dumps(body).encode()) as answer:
                one.status = answer.status
                async for line in answer.lines():
                    if answer.status == 200:
                        self._read(line, one, pieces)
                if answer.status != 200:
                    retry_after_s = _retry_after_s(answer.headers.get("retry-after"))
            if one.status == 200 and not one.is_complete:
                raise BrokenAnswer("the stream has no end")
        except BrokenAnswer:
            one.status, retry_after_s = None, 1.0
        one.ended_at = self._clock.monotonic()
        self._on_change(self)
        return "".join(pieces), retry_after_s

    def _read(self, line: bytes, one: Sent, pieces: list[str]) -> None:
        if line.startswith(_DONE):
            one.is_complete = True
        if not line.startswith(b"data: {"):
            return
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            one.status = 500
        if usage := chunk.get("usage"):
            one.completion_tokens = usage["completion_tokens"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            one.computed_tokens = usage.get("prompt_tokens", 0) - cached
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                one.token_times.append(self._clock.monotonic())
                pieces.append(text)


def _retry_after_s(header: str | None) -> float:
    """Returns the seconds of a `retry-after`; 1 if it has none, or a date."""
    return float(header) if header is not None and header.replace(".", "", 1).isdecimal() else 1.0


def _client(target: Target) -> StreamClient:
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    if target.deadline_ms is not None:
        headers["x-deadline-ms"] = str(target.deadline_ms)
    return StreamClient(target.url, headers)
