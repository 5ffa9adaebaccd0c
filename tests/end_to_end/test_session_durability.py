"""Tests of sessions under load: killed servers, many sessions with tools, and readers that reconnect."""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from graftwork import Graftwork
from graftwork.demo.tasks import TOOLS
from tests.end_to_end.conftest import DemoServer

PAGE = 16
MODEL = "graftwork-demo"
WEATHER = TOOLS["get_weather"]
CITIES = ("Oslo", "Rome", "Lima", "Paris", "Cairo", "Quito", "Delhi", "Seoul", "Tunis", "Accra")
TERMINAL = {"turn.completed", "turn.awaiting_tool", "turn.failed", "turn.cancelled"}
_MB = 1 << 20


def frames(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Returns the numbered events of a stream."""
    seq = 0
    for line in lines:
        if line.startswith("id: "):
            seq = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            yield seq, json.loads(line.removeprefix("data: "))


def replay(server: DemoServer, headers: dict[str, str], session_id: str, after: int) -> list[tuple[int, Any]]:
    """Returns the events that a reader gets after number `after`."""
    headers = headers | {"last-event-id": str(after)}
    with httpx.stream("GET", f"{server.url}/v1/sessions/{session_id}/events", headers=headers, timeout=60) as answer:
        return list(frames(answer.iter_lines()))


def test_readers_resume_after_a_kill(restartable: DemoServer) -> None:
    """After a kill of the server during a turn, reconnecting readers see each event once, up to a typed end, and the
    session takes the turn again. What was delivered is billed, once."""
    server = restartable
    server.start()
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    events = []
    with Graftwork(server.url, api_key=server.key("Plain")) as client:
        session = client.sessions.create(model=MODEL, sampling={"max_tokens": 1500, "ignore_eos": True})
        path = f"{server.url}/v1/sessions/{session.id}"
        for event in session.turn("Hello!", stream=True):
            events.append((event.seq, event.type))
            if len(events) == 6:
                server.kill()
                server.start()

    whole = replay(server, headers, session.id, after=0)
    rest = replay(server, headers, session.id, after=6)
    stands = httpx.get(path, headers=headers).json()
    usage = httpx.get(f"{server.url}/v1/usage?group_by=session", headers=headers).json()["data"]
    body = {"input": "Hello!", "sampling": {"max_tokens": 8}}
    again = httpx.post(f"{path}/turns", headers=headers, json=body, timeout=60).json()

    assert events == [(seq, data["type"]) for seq, data in whole]
    assert rest == whole[6:]
    assert [seq for seq, _ in whole] == list(range(1, len(whole) + 1))
    assert [data["type"] in TERMINAL for _, data in whole] == [False] * (len(whole) - 1) + [True]
    assert (whole[-1][1]["type"], whole[-1][1]["error"]["code"]) == ("turn.failed", "turn_interrupted")
    assert (stands["status"], stands["head"], stands["last_seq"]) == ("idle", None, len(whole))
    assert again["status"] == "completed"
    (billed,) = [row for row in usage if row["group"] == session.id]
    assert billed["requests"] == 1
    assert len(whole) - 2 <= billed["completion_tokens"] < 1500


def test_a_client_that_asks_for_it_takes_its_turn_along(server: DemoServer) -> None:
    """A lost connection cancels a turn with `cancel_on_disconnect`, and no other turn."""
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    ends = []
    for takes_along in (True, False):
        sampling = {"max_tokens": 300, "ignore_eos": True}
        created = httpx.post(f"{server.url}/v1/sessions", headers=headers, json={"model": MODEL, "sampling": sampling})
        session_id = created.json()["id"]
        url = f"{server.url}/v1/sessions/{session_id}/turns"
        body = {"input": "Hello!", "stream": True, "cancel_on_disconnect": takes_along}
        with httpx.stream("POST", url, headers=headers, json=body, timeout=60) as answer:
            next(frames(answer.iter_lines()))
        ends.append(replay(server, headers, session_id, after=0)[-1][1]["type"])

    assert ends == ["turn.cancelled", "turn.completed"]


@dataclass
class ClientSession:
    """A session as a client knows it: its id and all items sent or received."""

    client: httpx.AsyncClient
    name: str
    id: str = ""
    said: list[dict[str, Any]] = field(default_factory=list)
    """Every item, as the client sent it or was answered."""
    turns: list[dict[str, Any]] = field(default_factory=list)

    async def begin(self) -> None:
        sampling = {"temperature": 0, "max_tokens": 48}
        body = {"model": MODEL, "tools": [WEATHER], "sampling": sampling, "metadata": {"name": self.name}}
        answer = await self.client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]

    async def take_turn(self, number: int) -> None:
        """One turn: the outputs of what the last one called, or something new to answer."""
        calls = self.turns[-1]["tool_calls"] if self.turns else []
        body: dict[str, Any]
        city = CITIES[number % len(CITIES)]
        if calls:
            outputs = [{"call_id": call["call_id"], "output": f"{self.name}: {number} degrees"} for call in calls]
            self.said += [{"type": "function_call_output", **output} for output in outputs]
            path, body = "tool_outputs", {"outputs": outputs}
        else:
            text = f"What is the weather in {city}?"
            self.said.append({"type": "message", "role": "user", "text": text})
            path, body = "turns", {"input": text}
        answer = await self.client.post(f"/v1/sessions/{self.id}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        self.turns.append(answer.json())
        assert self.turns[-1]["status"] in ("completed", "awaiting_tool"), self.turns[-1]
        self.said += self.turns[-1]["output"]

    async def check(self) -> None:
        """What the server remembers is what was said, in that order, each item once."""
        path = f"/v1/sessions/{self.id}/items?limit=100"
        items = (await self.client.get(path)).json()["data"]
        assert [content_of(item) for item in items] == [content_of(item) for item in self.said]
        assert len({item["id"] for item in items}) == len(items)


def content_of(item: dict[str, Any]) -> tuple[str, ...]:
    """Returns the content of an item, in whichever form it is written."""
    if item["type"] == "message":
        text = item.get("text") or "".join(part["text"] for part in item["content"])
        return ("message", item["role"], text)
    if item["type"] == "function_call":
        return ("function_call", item["call_id"], item["name"], item["arguments"])
    return ("function_call_output", item["call_id"], item["output"])


async def run_sessions(server: DemoServer, num_sessions: int, num_turns: int) -> list[ClientSession]:
    """Runs `num_sessions` sessions at once with `num_turns` turns each."""
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    limits = httpx.Limits(max_connections=num_sessions)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600, limits=limits) as client:
        client_sessions = [ClientSession(client, f"talk {number}") for number in range(num_sessions)]

        async def hold(client_session: ClientSession) -> None:
            await client_session.begin()
            for number in range(num_turns):
                await client_session.take_turn(number)
            await client_session.check()
            await client.delete(f"/v1/sessions/{client_session.id}")

        await asyncio.gather(*map(hold, client_sessions))
    return client_sessions


def resident_mb(server: DemoServer) -> float:
    """Returns the resident memory of the gateway's process in MB."""
    assert server.process is not None
    return float(psutil.Process(server.process.pid).memory_info().rss) / _MB


def slope(values: Sequence[float]) -> float:
    """Returns the least-squares slope of equally spaced values."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    rise = sum((place - middle) * (value - mean) for place, value in enumerate(values))
    return rise / sum((place - middle) ** 2 for place in range(len(values)))


def test_twenty_turns_recompute_only_what_is_new(server: DemoServer) -> None:
    """Of twenty turns with tools, each recomputes its new items and at most one page more."""

    async def run_turns() -> ClientSession:
        headers = {"authorization": f"Bearer {server.key('Plain')}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
            client_session = ClientSession(client, "it is")
            await client_session.begin()
            for number in range(20):
                await client_session.take_turn(number)
            await client_session.check()
        return client_session

    turns = asyncio.run(run_turns()).turns

    statuses = [turn["status"] for turn in turns]
    assert statuses.count("awaiting_tool") >= 5
    for earlier, turn in itertools.pairwise(turns):
        history = earlier["usage"]["total_tokens"]
        new = turn["usage"]["prompt_tokens"] - history
        assert new > 0
        assert turn["usage"]["prompt_tokens_details"]["recomputed_tokens"] <= new + PAGE


def test_a_crowd_of_sessions_loses_nothing(server: DemoServer) -> None:
    """Sixteen sessions at once with four tool turns each keep every item once and in order."""
    client_sessions = asyncio.run(run_sessions(server, 16, 4))

    assert sum(len(client_session.turns) for client_session in client_sessions) == 64
    assert any(turn["status"] == "awaiting_tool" for client_session in client_sessions for turn in client_session.turns)


@pytest.mark.slow
def test_a_large_crowd_of_sessions_loses_nothing_and_leaves_nothing(restartable: DemoServer) -> None:
    """Two hundred sessions with ten turns each lose no item, and twelve groups of forty sessions do not fill the
    memory."""
    server = restartable
    server.start()
    asyncio.run(run_sessions(server, 200, 10))
    memory = [resident_mb(server)]

    for _ in range(12):
        asyncio.run(run_sessions(server, 40, 5))
        memory.append(resident_mb(server))

    told = f"resident MB after each crowd: {[round(value, 1) for value in memory]}"
    assert slope(memory) < 0.5, told
    assert memory[-1] < memory[0] * 1.1, told
