"""Tests of the parts of the demo, and a slow test of the whole story."""

import json
import socket
from pathlib import Path

import httpx
import pytest

from graftwork.api.cli.demo.conversation import Talk, Turn
from graftwork.api.cli.demo.report import Claim, Report, figures_of, show_report
from graftwork.api.cli.demo.script import TOOLS_BY_JOB, Ask, asks_for, expected_answer, schemas_for
from graftwork.api.cli.demo.server import DemoServer, ServerFailed
from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.demo.tasks import run_tool
from graftwork.platform.clock import ManualClock
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import QueuedTextEngine
from tests.api.in_process_gateway import gateway_settings, open_gateway, write_model_folder

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Quorzum"}}\n</tool_call>'


@pytest.mark.parametrize("job", TOOLS_BY_JOB)
def test_what_is_asked_stays_the_same(job: str) -> None:
    """Two runs of the demo ask the same questions, about tools that the session has."""
    offered = {schema["function"]["name"] for schema in schemas_for(job)}

    assert asks_for(job) == asks_for(job)
    assert {ask.tool for ask in asks_for(job)} <= offered


async def test_a_talk_runs_its_tools(tmp_path: Path) -> None:
    """A conversation records questions, calls, results and answers with their tokens and times."""
    answer = expected_answer("base", "get_time", {"city": "Quorzum"}, run_tool("get_time", {"city": "Quorzum"}))
    engine, clock = QueuedTextEngine(), ManualClock()
    engine.lines.extend([CALL, answer])
    model = write_model_folder(tmp_path / "tiny")

    async with open_gateway(gateway_settings(tmp_path, model)) as gateway:
        gateway.engine.generate = engine.generate  # type: ignore[method-assign]
        tenant = await gateway.tenant()
        transport = httpx.ASGITransport(app=gateway.app)
        async with tenant.client, AsyncGraftwork("http://gateway.test", tenant.key, transport=transport) as client:
            session = await client.sessions.create(model="tiny", tools=schemas_for("base"))
            talk = Talk("a talk", "base", session, clock)
            exchange = await talk.say(Ask("What time is it in Quorzum?", "get_time"))

    assert exchange.answer == answer
    assert talk.is_in_voice(exchange)
    assert [call.name for call, _ in exchange.results] == ["get_time"]
    assert len(exchange.turns) == 2
    assert all(turn.prompt_tokens and turn.completion_tokens and turn.ttft_s == 0 for turn in exchange.turns)
    figures = figures_of(talk)
    assert (figures.turns, figures.calls, figures.ttft_ms) == (2, 1, 0.0)


def report_of(*claims: Claim) -> Report:
    return Report(talks=(), claims=claims, max_adapters_in_a_step=3, seconds=1.0)


def test_a_broken_claim_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The report prints each claim that this run does not meet on standard error."""
    report = report_of(Claim("the sky is blue", True, "yes"), Claim("pigs fly", False, "0 of 3"))

    show_report(report, as_json=False)

    shown = capsys.readouterr()
    assert not report.holds
    assert "✓ the sky is blue: yes\n✗ pigs fly: 0 of 3" in shown.out
    assert shown.err == "Error: this run does not bear out: pigs fly\n"


def test_the_report_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON report has the result, the figures and the claims."""
    show_report(report_of(Claim("the sky is blue", True, "yes")), as_json=True)

    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], body["max_adapters_in_a_step"]) == (True, 3)


def test_figures_of_silence() -> None:
    """A turn that never began has no time to its first token, and causes no division by zero."""
    assert Turn(started_at=1.0).ttft_s is None


@pytest.mark.slow
async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """If the server's process ends at its start, the wait ends and the error has its last output."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = DemoServer(tmp_path, port=taken.getsockname()[1])

        with pytest.raises(ServerFailed, match="cannot be listened on"):
            await server.start()


@pytest.mark.slow
def test_the_story_holds(graftwork: Graftwork) -> None:
    """On the shipped model and adapters the demo meets each of its claims."""
    result = graftwork("demo", "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["max_adapters_in_a_step"] >= 2
