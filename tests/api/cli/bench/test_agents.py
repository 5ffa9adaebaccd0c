"""Tests of `graftwork bench sessions` against a real gateway, and of its figures."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from graftwork.api.cli.bench.agents import NumberedTurn, turn_figures
from graftwork.api.cli.demo.conversation import Turn, listen
from graftwork.platform.answers.session_events import SessionEvent, read_session_event
from graftwork.platform.answers.usage import CacheReport
from graftwork.platform.clock import ManualClock
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway, listening_gateway
from tests.api.in_process_gateway import write_model_folder

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "bell"}}\n</tool_call>'


@pytest.fixture
def live(tmp_path: Path, sqlite_template: Path) -> Iterator[LiveGateway]:
    model = write_model_folder(tmp_path / "tiny")
    (tmp_path / "data").mkdir()
    with listening_gateway(tmp_path / "data", model, sqlite_template) as gateway:
        yield gateway


@pytest.fixture
def other_server() -> Iterator[str]:
    """The address of a server that knows no path."""

    class NoPath(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Prints nothing."""

    server = HTTPServer(("127.0.0.1", 0), NoPath)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_agents_call_tools_fork_and_close_their_sessions(live: LiveGateway, graftwork: Graftwork) -> None:
    """Two agents take four turns each in two branches from the middle: two trunks of 2 turns, and 2 x 2 branches of 2."""
    live.engine.text = CALL

    result = graftwork(
        *("bench", "sessions", "--url", live.url, "--key", live.key, "--model", "tiny", "--json"),
        *("--agents", "2", "--turns", "4", "--branches", "2", "--tool-seconds", "0.001"),
    )

    assert result.exit_code == 0, result.output
    turns = json.loads(result.stdout)["turns"]
    assert [(one["number"], one["turns"], one["failed"]) for one in turns] == [
        (1, 2, 0),
        (2, 2, 0),
        (3, 4, 0),
        (4, 4, 0),
    ]
    assert len(live.engine.requests) == 12
    longest = max(live.engine.requests, key=lambda request: len(request.prompt_token_ids))
    assert len(longest.prompt_token_ids) > 3 * len(live.engine.requests[0].prompt_token_ids) / 2


def test_a_server_without_sessions_is_named(graftwork: Graftwork, other_server: str) -> None:
    """Another server gets one clear line, which names the command that can measure it."""
    result = graftwork("bench", "sessions", "--url", other_server, "--key", "k")

    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{other_server} has no /v1/sessions" in result.stderr
    assert "graftwork bench throughput --url" in result.stderr


def turn(number: int, started_at: float, first_at: float, device: int, host: int, recomputed: int) -> NumberedTurn:
    cache = CacheReport.read(
        {
            "cached_tokens": device + host,
            "device_tokens": device,
            "host_tokens": host,
            "disk_tokens": 0,
            "recomputed_tokens": recomputed,
            "miss_reason": None,
        }
    )
    return NumberedTurn(number, Turn(started_at, first_at, first_at + 1.0, cache=cache))


def test_shares_are_of_tokens_not_of_turns() -> None:
    """The cached share by tier is that of all tokens of the turns of a number, and a failed turn has no times."""
    failed = NumberedTurn(2, Turn(0.0, ended_at=9.0, failure="full"))

    first, second = turn_figures(
        [turn(2, 5.0, 5.5, 90, 0, 10), turn(1, 0.0, 0.1, 0, 0, 50), turn(2, 5.0, 5.2, 0, 200, 100), failed]
    )

    assert (first.number, first.shares["recomputed"]) == (1, 1.0)
    assert second.shares == pytest.approx({"device": 90 / 400, "host": 200 / 400, "disk": 0.0, "recomputed": 110 / 400})
    assert (second.turns, second.failed) == (3, 1)
    assert (second.ttft_p50, second.ttft_p99, second.turn_p50) == pytest.approx((0.5, 0.5, 1.5))


class _Events:
    """A stream of the given events."""

    def __init__(self, *events: Mapping[str, object]) -> None:
        names = {"seq": 1, "session_id": "s", "turn_id": "t"}
        self._events = [read_session_event({**names, **event}) for event in events]

    async def __aiter__(self) -> AsyncIterator[SessionEvent]:
        for event in self._events:
            yield event


async def test_only_a_turn_that_awaits_tools_has_calls() -> None:
    """A call of a turn that `max_tokens` has cut awaits no output; that of a turn that awaits tools does."""
    call: dict[str, object] = {"type": "tool_call.done", "call_id": "call_1", "name": "look_up", "arguments": "{}"}
    waits = {"type": "turn.awaiting_tool", "call_ids": ("call_1",), "lease": None, "checkpoint_id": None, "usage": None}
    cut = {"type": "turn.completed", "checkpoint_id": None, "usage": None, "finish_reason": "length"}

    asked = await listen(_Events(call, waits), ManualClock())
    ended = await listen(_Events(call, cut), ManualClock())

    assert [one.call_id for one in asked.calls] == ["call_1"]
    assert ended.calls == []
