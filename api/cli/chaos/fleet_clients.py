"""Defines clients that go on through every fault, and write down what they were told.

Owns the records of the clients. Never strikes a fleet.

A client sends each request to one of the gateways by chance. What fails for a reason that a client may retry is sent
again, until it is answered.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx

from graftwork.api.cli.chaos.fleet import Fleet

MODEL = "graftwork-demo"

ATTEMPT_S = 20.0
"""How long one attempt may take. A client gives up sooner than this suite."""
PAUSE_S = 0.3
RETRIED = {409, 429, 500, 502, 503, 504}
FINAL_409 = {"idempotency_key_reused"}
_CHAT_TOKENS = 60
_SESSION_MESSAGES = 20
"""A session with so many messages is followed by a new one, since the model's context is short."""


class WrongAnswer(Exception):
    """An answer that no client would retry, or one that cannot be right. The message says what came."""


def refuse(answer: httpx.Response) -> NoReturn:
    raise WrongAnswer(f"{answer.status_code} of {answer.request.url}: {answer.text[:500]}")


@dataclass
class Told:
    """One streamed chat, as its client saw it."""

    request_id: str
    url: str = ""
    """The gateway that was asked."""
    num_tokens: int = 0
    end: str = "cut"
    """`completed`, `failed` by the server, or `cut`."""
    ended_at: float = 0.0
    """When it was cut, on the monotonic clock."""


@dataclass
class Client:
    """One client of a tenant."""

    fleet: Fleet
    http: httpx.AsyncClient
    luck: random.Random
    num_refused: int = 0
    """Attempts that were answered with an error that a client may retry."""
    num_done: int = 0
    """Operations that were answered in the end."""
    done_at: float = 0.0
    """When the last of them was, on the monotonic clock."""

    def url(self) -> str:
        return self.luck.choice(self.fleet.urls)

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            await self.act()
            self.num_done += 1
            self.done_at = time.monotonic()

    async def act(self) -> None:
        """Does one operation, and returns when it is answered."""
        raise NotImplementedError

    async def answered(self, method: str, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        """Sends a request until it is answered with a success."""
        while True:
            try:
                answer = await self.http.request(
                    method, self.url() + path, json=body, headers=headers, timeout=ATTEMPT_S
                )
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
                continue
            if answer.is_success:
                return answer
            code = answer.json().get("error", {}).get("code")
            if answer.status_code not in RETRIED or code in FINAL_409:
                refuse(answer)
            self.num_refused += 1
            await asyncio.sleep(PAUSE_S)


@dataclass
class ChatClient(Client):
    """Streams chats of a known number of tokens."""

    told: list[Told] = field(default_factory=list)

    async def act(self) -> None:
        end = await self._try()
        while end != "completed":
            await asyncio.sleep(PAUSE_S)
            end = await self._try()

    async def _try(self) -> str:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say {self.luck.random()}"}],
            "stream": True,
            "logprobs": True,
            "max_tokens": _CHAT_TOKENS,
            "ignore_eos": True,
        }
        told, url = None, self.url()
        try:
            async with self.http.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=ATTEMPT_S) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    if answer.status_code not in RETRIED:
                        refuse(answer)
                    self.num_refused += 1
                    return "refused"
                told = Told(answer.headers["x-request-id"], url)
                self.told.append(told)
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        _take(told, line.removeprefix("data: "))
        except httpx.TransportError:
            pass
        if told is None:
            return "cut"
        told.ended_at = time.monotonic()
        return told.end


def _take(told: Told, data: str) -> None:
    """Counts the tokens of an event: each has its log probability."""
    if data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        told.end = "failed"
        return
    for choice in event["choices"]:
        told.num_tokens += len((choice.get("logprobs") or {}).get("content") or ())
        if choice["finish_reason"] is not None:
            told.end = "completed"


@dataclass
class SessionClient(Client):
    """Holds one session after another, and knows all items of their completed turns."""

    said: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """By session, the newest last: role and text of each message of completed turns."""
    completed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The usage of each completed turn by its id."""
    failed: set[str] = field(default_factory=set)
    """The turns that the server has failed."""

    async def act(self) -> None:
        if not self.said or len(self.said[self.session_id]) >= _SESSION_MESSAGES:
            body = {"model": MODEL, "sampling": {"max_tokens": 24, "temperature": 0}}
            made = await self.answered("POST", "/v1/sessions", body, {"idempotency-key": self.new_key()})
            self.said[made.json()["id"]] = []
        text = f"Number {len(self.said[self.session_id])}: {self.luck.random()}"
        while not await self.take_turn(text, self.new_key()):
            pass

    @property
    def session_id(self) -> str:
        return next(reversed(self.said))

    async def take_turn(self, text: str, key: str) -> bool:
        """Sends one turn under one key until it has an end. Returns False if the server failed it."""
        path = f"/v1/sessions/{self.session_id}/turns"
        turn = (await self.answered("POST", path, {"input": text}, {"idempotency-key": key})).json()
        if turn["status"] == "failed":
            if turn["error"]["code"] == "invalid_request":
                raise WrongAnswer(f"a right request is called wrong: {turn}")
            self.failed.add(turn["id"])
            return False
        if turn["status"] != "completed":
            raise WrongAnswer(f"a turn was answered before it ended: {turn}")
        if turn["id"] in self.completed:
            raise WrongAnswer(f"two idempotency keys got one turn: {turn}")
        self.completed[turn["id"]] = turn["usage"]
        said = self.said[self.session_id]
        said.append(("user", text))
        said += [("assistant", _text(item)) for item in turn["output"] if item["type"] == "message"]
        return True

    def new_key(self) -> str:
        return f"{self.luck.getrandbits(64):x}"

    async def stored(self, session_id: str) -> list[tuple[str, str]]:
        """Reads the messages that the server has of a session."""
        found: list[tuple[str, str]] = []
        after = ""
        while True:
            path = f"/v1/sessions/{session_id}/items?limit=100&order=asc{after}"
            page = (await self.answered("GET", path, None, {})).json()
            found += [(item["role"], _text(item)) for item in page["data"]]
            if not page["has_more"]:
                return found
            after = f"&after={page['data'][-1]['id']}"


def _text(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])
