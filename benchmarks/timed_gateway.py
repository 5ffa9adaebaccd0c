"""Runs a `graftwork` command whose gateway notes when each request arrives, goes on and is answered.

    python benchmarks/timed_gateway.py --times PATH -- module:function ARGUMENTS...

The process writes one line of JSON for each answer to PATH, at the end of the answer; times are in seconds of one
clock. So a benchmark can tell the server's own latency from a client's wait for a core. Hooks a few functions of the
gateway by their names, and fails at the start if one of them has moved. A request's arrival is when its last byte is
parsed; what a request waits in the socket while the event loop is busy is not in it. `loop_waits` are the longest turns
of the event loop, which are the most that a request can wait there. uvloop tells nobody of its turns, so the gateway
runs on asyncio's own event loop here.
"""

import argparse
import importlib
import json
import selectors
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from server_processes import Checkout

_STATE = "timed_answer"
_WRITE = "write_body"
"""`WRITE_BODY` of `api/http/streaming.py`; older checkouts have none."""


@dataclass(slots=True)
class TimedAnswer:
    """When one request reached which point, in seconds; 0 where it never came."""

    path: str
    arrived: float = 0.0
    submitted: float = 0.0
    """When its first generation began."""
    sent: float = 0.0
    """When its first generation was sent to the engine. One that the gateway's client of the engine refuses is not."""
    engine_text: float = 0.0
    """When the engine's first token arrived."""
    started: float = 0.0
    """When the head of the answer was written to the socket."""
    first_text: float = 0.0
    """When the first text was written to the socket."""
    status: int = 0
    longest_turn: float = 0.0
    """The longest turn of the event loop, in seconds, since the last answer that was noted."""


def timed_command(checkout: Checkout, times: Path, *arguments: str) -> list[str]:
    """Returns the command that runs `graftwork ARGUMENTS` of a checkout, and notes its answers in `times`."""
    return [sys.executable, __file__, "--times", str(times), "--", checkout.entry_point, *arguments]


def read_times(times: Path) -> list[TimedAnswer]:
    """Returns what a process has noted so far."""
    known = {field.name for field in fields(TimedAnswer)}
    rows = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    return [TimedAnswer(**{name: value for name, value in row.items() if name in known}) for row in rows]


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """Returns a percentile in milliseconds, such as the median for a `share` of 0.5; NaN if there are no values."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else float("nan")


class Times:
    """Notes the times of all answers of this process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._by_request: dict[str, TimedAnswer] = {}
        self._longest_turn = 0.0
        self._turn_began: float | None = None

    def watch_loop(self) -> None:
        """Measures the turns of the main thread's event loop: from the return of `select` to its next call."""
        select = selectors.DefaultSelector.select
        main = threading.main_thread()

        def timed_select(selector: Any, timeout: float | None = None) -> Any:
            if threading.current_thread() is not main:
                return select(selector, timeout)
            if self._turn_began is not None:
                self._longest_turn = max(self._longest_turn, time.perf_counter() - self._turn_began)
            found = select(selector, timeout)
            self._turn_began = time.perf_counter()
            return found

        selectors.DefaultSelector.select = timed_select  # type: ignore[method-assign,assignment]

    def watch_connections(self, connection: Any) -> None:
        """Notes when the last byte of a request is parsed."""
        complete = connection.on_message_complete

        def on_message_complete(protocol: Any) -> None:
            protocol.scope.setdefault("state", {})[_STATE] = TimedAnswer(protocol.scope["path"], time.perf_counter())
            complete(protocol)

        connection.on_message_complete = on_message_complete

    def watch_answers(self, middleware: Any) -> None:
        """Notes when an answer begins, and when its first text is written."""
        call = middleware.__call__

        async def timed_call(self_: Any, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await call(self_, scope, receive, send)
                return
            found: list[TimedAnswer] = []

            async def timed_send(message: Any) -> None:
                await send(message)
                answer = self._answer(scope, found)
                if answer is None:
                    return
                if message["type"] == "http.response.start":
                    answer.status, answer.started = message["status"], time.perf_counter()
                elif not answer.first_text and _has_text(message["body"]):
                    answer.first_text = time.perf_counter()

            write = scope.get("state", {}).get(_WRITE)

            async def timed_write(body: bytes) -> None:
                await write(body)
                answer = self._answer(scope, found)
                if answer is not None and not answer.first_text and _has_text(body):
                    answer.first_text = time.perf_counter()

            if write is not None:  # the pieces of a stream go to the connection directly
                scope["state"][_WRITE] = timed_write
            try:
                await call(self_, scope, receive, timed_send)
            finally:
                self._note(scope, found)

        middleware.__call__ = timed_call

    def watch_engine(self, client: Any) -> None:
        """Notes when a request is submitted to the engine, and when its first token comes back."""
        generate = client.generate

        async def timed_generate(self_: Any, request: Any) -> AsyncIterator[Any]:
            answer = TimedAnswer("", submitted=time.perf_counter())
            answer = self._by_request.setdefault(request.request_id.partition(".")[0], answer)
            events = generate(self_, request)
            try:
                async for event in events:
                    if not answer.engine_text and type(event).__name__ == "TokensGenerated":
                        answer.engine_text = time.perf_counter()
                    yield event
            finally:
                await events.aclose()

        client.generate = timed_generate

    def watch_sending(self, conversation: Any) -> None:
        """Notes when a request is sent to the engine."""
        submit = conversation.submit

        async def timed_submit(self_: Any, request: Any) -> Any:
            answer = self._by_request.get(request.request_id.partition(".")[0])
            if answer is not None and not answer.sent:
                answer.sent = time.perf_counter()
            return await submit(self_, request)

        conversation.submit = timed_submit

    def _answer(self, scope: Any, found: list[TimedAnswer]) -> TimedAnswer | None:
        if not found and (answer := scope["state"].get(_STATE)) is not None:
            found.append(answer)
        return found[0] if found else None

    def _note(self, scope: Any, found: list[TimedAnswer]) -> None:
        answer = self._answer(scope, found)
        engine = self._by_request.pop(scope["state"].get("request_id", ""), None)
        if answer is None:
            return
        if engine is not None:
            answer.submitted, answer.sent, answer.engine_text = engine.submitted, engine.sent, engine.engine_text
        answer.longest_turn, self._longest_turn = self._longest_turn, 0.0
        self._file.write(json.dumps(asdict(answer)) + "\n")


def _has_text(body: bytes) -> bool:
    return b'"content":"' in body.replace(b'"content":""', b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="-- module:function ARGUMENTS...")
    arguments = parser.parse_args()
    entry_point, *rest = arguments.command
    times = Times(arguments.times)
    importlib.import_module("graftwork.api.server.uvicorn_server").__dict__["uvloop"] = None
    times.watch_loop()
    times.watch_connections(importlib.import_module("graftwork.api.server.http_connection").HttpConnection)
    times.watch_answers(importlib.import_module("graftwork.api.http.middleware").RequestIdMiddleware)
    times.watch_engine(importlib.import_module("graftwork.engine.rpc.client").GrpcEngineClient)
    times.watch_sending(importlib.import_module("graftwork.engine.rpc.conversation").Conversation)
    module, _, function = entry_point.partition(":")
    sys.argv = ["graftwork", *rest]
    sys.exit(getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    main()
