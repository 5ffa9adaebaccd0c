"""Tests of the SDK's sessions: turns, the tool loop and forks."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from graftwork.api.sdk.runs import GoingOn
from graftwork.api.sdk.transport.errors import ToolLoopError, TurnFailedError
from graftwork.api.sdk.transport.tools import ToolOutput, run_tools
from graftwork.platform.answers.sessions import PendingCall
from tests.api.sdk.scripted_server import ScriptedServer, session, turn


def call(call_id: str, name: str, **arguments: Any) -> dict[str, str]:
    return {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


def awaiting(*calls: dict[str, str]) -> httpx.Response:
    return turn("awaiting_tool", tool_calls=list(calls))


def given(
    outputs: list[dict[str, str]], calls: Sequence[dict[str, str]] = (), status: str = "awaiting_tool"
) -> httpx.Response:
    """The open calls and stored outputs come from the server."""
    body = {"object": "tool_outputs", "session_id": "ses_1", "status": status}
    return httpx.Response(200, json=body | {"outputs": outputs, "tool_calls": list(calls)})


def test_run_answers_calls_until_the_end() -> None:
    """The calls of each turn are run and answered, and the last turn is the answer."""
    server = ScriptedServer(
        session(), awaiting(call("a", "add", x=1, y=2)), awaiting(call("b", "add", x=3, y=4)), turn(text="It is 10.")
    )
    conversation = server.client().sessions.create(model="base")

    run = conversation.run("Sum?", tools={"add": lambda x, y: {"sum": x + y}})

    assert run.text == "It is 10."
    assert len(run.turns) == 3
    assert server.body(2)["outputs"] == [{"call_id": "a", "output": '{"sum": 3}'}]
    assert server.body(3)["outputs"] == [{"call_id": "b", "output": '{"sum": 7}'}]
    assert conversation.head == "ckp_1"


def test_all_turns_of_a_run_have_its_tier_and_end_user() -> None:
    """The turns after tool outputs are sent with the service tier and the end user of the first one; without them, none is
    sent."""
    script = (session(), awaiting(call("a", "add", x=1, y=2)), turn(text="It is 3."))
    asked, plain = ScriptedServer(*script), ScriptedServer(*script)

    options: GoingOn = {"service_tier": "flex", "user": "alice"}
    asked.client().sessions.create(model="base").run("Sum?", tools={"add": lambda x, y: x + y}, **options)
    plain.client().sessions.create(model="base").run("Sum?", tools={"add": lambda x, y: x + y})

    assert all(options.items() <= asked.body(number).items() for number in (1, 2))
    assert not any(options.keys() & plain.body(number).keys() for number in (1, 2))


def test_calls_of_one_turn_run_side_by_side() -> None:
    """The calls of one turn run at the same time."""
    meeting = threading.Barrier(2, timeout=60)
    server = ScriptedServer(session(), awaiting(call("a", "meet"), call("b", "meet")), turn(text="Done."))

    server.client().sessions.create(model="base").run("Meet", tools={"meet": lambda: str(meeting.wait())})

    assert [output["call_id"] for output in server.body(2)["outputs"]] == ["a", "b"]


def test_failures_are_answers() -> None:
    """An exception, a wrong name, wrong arguments and broken JSON are all sent to the model as errors."""
    calls = [call("a", "fail"), call("b", "nope"), call("c", "fail", x=1)]
    calls.append({"call_id": "d", "name": "fail", "arguments": "{"})
    server = ScriptedServer(session(), awaiting(*calls), turn(text="Sorry."))

    def fail() -> None:
        raise ValueError("no luck")

    server.client().sessions.create(model="base").run("Try", tools={"fail": fail})

    outputs = [json.loads(output["output"])["error"] for output in server.body(2)["outputs"]]
    assert outputs[0] == "ValueError: no luck"
    assert "no tool 'nope'; the tools are fail" in outputs[1]
    assert outputs[2].startswith("TypeError")
    assert outputs[3].startswith("JSONDecodeError")


def test_a_slow_tool_is_given_up() -> None:
    """A call over its time limit is answered with an error, and the others keep their results."""
    server = ScriptedServer(session(), awaiting(call("a", "hang"), call("b", "quick")), turn(text="Late."))
    released = threading.Event()
    tools = {"hang": lambda: released.wait(30), "quick": lambda: "ok"}

    server.client().sessions.create(model="base").run("Go", tools=tools, tool_timeout={"hang": 0.01})
    released.set()

    hung, quick = (output["output"] for output in server.body(2)["outputs"])
    assert json.loads(hung) == {"error": "hang did not answer within 0.01 seconds"}
    assert quick == "ok"


def test_endless_calls_are_stopped() -> None:
    """After `max_turns` a run ends, and the tools of the last turn are not run."""
    server = ScriptedServer(session(), *[awaiting(call("a", "f")) for _ in range(3)])
    conversation = server.client().sessions.create(model="base")
    runs: list[int] = []

    with pytest.raises(ToolLoopError) as stopped:
        conversation.run("Loop", tools={"f": lambda: runs.append(1)}, max_turns=3)

    assert (len(server.requests), len(runs), len(stopped.value.turns)) == (4, 2, 3)
    assert conversation.status == "awaiting_tool"


def test_each_tool_has_its_own_time() -> None:
    """A limit by name applies to that tool; other tools have the default limit."""
    server = ScriptedServer(session(), awaiting(call("a", "hang"), call("b", "waits")), turn(text="Late."))
    hung, released = threading.Event(), threading.Event()

    def waits() -> str:
        hung.wait(30)
        return "ok"

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            hung.set()

    server.client().sessions.create(model="base").run(
        "Go", tools={"hang": hang, "waits": waits}, tool_timeout={"hang": 0.01}
    )
    released.set()

    first, second = (output["output"] for output in server.body(2)["outputs"])
    assert json.loads(first) == {"error": "hang did not answer within 0.01 seconds"}
    assert second == "ok"


class RaisesOnRepr:
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (TimeoutError("the database is slow"), "TimeoutError: the database is slow"),
        (asyncio.CancelledError("changed my mind"), "CancelledError: changed my mind"),
        (StopIteration(), "RuntimeError: "),
        (RaisesOnRepr(), "RuntimeError: no words"),
        ({(1, 2): 3}, "TypeError"),
        ("half a pair: \ud800", "UnicodeEncodeError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_no_tool_breaks_the_loop(result: Any, error: str, is_async: bool) -> None:
    """Whatever a tool raises or returns, its call is answered, and the others keep their results."""

    def plain() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    async def awaited() -> Any:
        return plain()

    calls = [
        PendingCall(call_id="a", name="bad", arguments="{}"),
        PendingCall(call_id="b", name="good", arguments="{}"),
    ]
    tools = {"bad": awaited if is_async else plain, "good": lambda: "ok"}

    bad, good = await run_tools(calls, tools, None)

    assert good.output == "ok"
    assert json.loads(bad.output)["error"].startswith(error)


async def test_a_cancelled_run_stops_its_tools() -> None:
    """Cancelling a run cancels its tools."""
    started, stopped = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    running = asyncio.create_task(
        run_tools([PendingCall(call_id="a", name="hang", arguments="{}")], {"hang": hang}, None)
    )
    await started.wait()
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped.is_set()


def interrupted(code: str = "turn_interrupted") -> httpx.Response:
    return turn("failed", error={"message": "cut off", "code": code}, checkpoint_id=None)


@pytest.mark.parametrize("code", ["turn_interrupted", "shutting_down"])
def test_a_turn_cut_off_by_a_restart_is_started_again(code: str) -> None:
    """A turn that a server's restart interrupted is sent again with a new key, and no tool runs twice."""
    cut_off = interrupted(code)
    server = ScriptedServer(session(), cut_off, awaiting(call("a", "f")), cut_off, cut_off, turn(text="Done."))
    runs: list[int] = []

    run = server.client().sessions.create(model="base").run("Go", tools={"f": lambda: runs.append(1)})

    assert (run.text, len(run.turns), len(runs)) == ("Done.", 2, 1)
    assert server.body(1) == server.body(2)
    assert server.body(3) == server.body(4) == server.body(5)
    keys = [request.headers["idempotency-key"] for request in server.requests[1:3]]
    assert keys[0] != keys[1]


def test_a_server_that_keeps_restarting_is_given_up() -> None:
    """After `max_retries` new starts the failed turn raises an error."""
    server = ScriptedServer(session(), interrupted(), interrupted())

    with pytest.raises(TurnFailedError, match="cut off"):
        server.client(max_retries=1).sessions.create(model="base").run("Go", tools={})


def test_a_session_is_resumed_at_its_open_calls() -> None:
    """Another program runs the open calls and continues to the answer."""
    stored = given([{"call_id": "a", "output": "7"}], [call("b", "add", x=1, y=2)])
    server = ScriptedServer(session(status="awaiting_tool"), stored, turn(text="It is 3."))

    run = server.client().sessions.get("ses_1").resume(tools={"add": lambda x, y: x + y})

    assert run.text == "It is 3."
    assert server.lines[1] == "GET /v1/sessions/ses_1/tool_outputs"
    assert server.body(2)["outputs"] == [{"call_id": "b", "output": "3"}]


def test_outputs_that_were_never_gone_on_with_are_resumed() -> None:
    """If every output is stored but the turn failed, the outputs are sent again and no tool runs."""
    outputs = [{"call_id": "a", "output": "7"}, {"call_id": "b", "output": "8"}]
    server = ScriptedServer(session(status="awaiting_tool"), given(outputs), turn(text="It is 15."))

    run = server.client().sessions.get("ses_1").resume(tools={})

    assert run.text == "It is 15."
    assert server.body(2)["outputs"] == outputs


def test_a_failed_turn_of_outputs_leaves_the_session_waiting() -> None:
    """Only a successful turn changes the session's known state."""
    server = ScriptedServer(session(), awaiting(call("a", "f")), turn("failed", checkpoint_id=None))
    conversation = server.client().sessions.create(model="base")
    conversation.turn("Go")

    conversation.tool_outputs([ToolOutput("a", "7")])

    assert (conversation.status, conversation.head) == ("awaiting_tool", "ckp_1")


def test_a_session_at_rest_has_nothing_to_resume() -> None:
    """Without open calls nothing is sent, and the run is empty."""
    server = ScriptedServer(session(), given([], status="idle"))

    run = server.client().sessions.get("ses_1").resume(tools={})

    assert (run.turns, run.text, len(server.requests)) == ((), "", 2)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_turn_without_an_answer_is_an_error(status: str) -> None:
    """`run` raises with the turn, so that its tokens are not lost."""
    server = ScriptedServer(session(), turn(status, error={"message": "engine gone"}))

    with pytest.raises(TurnFailedError, match="engine gone") as caught:
        server.client().sessions.create(model="base").run("Hi", tools={})

    assert caught.value.turn.status == status


async def test_async_tools_run_on_the_callers_loop() -> None:
    """AsyncGraftwork runs async tools on the caller's loop, beside plain functions."""
    server = ScriptedServer(session(), awaiting(call("a", "slow"), call("b", "plain")), turn(text="Done."))
    loops = []

    async def slow() -> str:
        loops.append(asyncio.get_running_loop())
        return "slow"

    async with server.async_client() as client:
        conversation = await client.sessions.create(model="base")
        run = await conversation.run("Go", tools={"slow": slow, "plain": lambda: "plain"})

    assert run.text == "Done."
    assert loops == [asyncio.get_running_loop()]


def test_async_tools_work_in_the_plain_client() -> None:
    """The plain client awaits an async tool."""
    server = ScriptedServer(session(), awaiting(call("a", "slow")), turn(text="Done."))

    async def slow() -> dict[str, int]:
        return {"x": 1}

    server.client().sessions.create(model="base").run("Go", tools={"slow": slow})

    assert server.body(2)["outputs"][0]["output"] == '{"x": 1}'


def test_turn_options_are_sent() -> None:
    """A turn's options are sent beside its input."""
    server = ScriptedServer(session(), turn(text="Hi"))

    server.client().sessions.create(model="base").turn("Hi", if_head="ckp_0", sampling={"temperature": 0})

    expected = {"input": "Hi", "stream": False, "if_head": "ckp_0", "sampling": {"temperature": 0}}
    assert server.body(1) == expected


def test_branches_are_sessions() -> None:
    """A fork returns the requested number of sessions, each ready for a turn."""
    branches = [{"id": f"ses_{number}", "status": "idle", "head": "ckp_1"} for number in (2, 3)]
    server = ScriptedServer(session(), httpx.Response(201, json={"data": branches}), turn(text="Left"))

    left, right = server.client().sessions.create(model="base").fork(at="ckp_1", count=2)

    assert (left.id, right.id, right.head) == ("ses_2", "ses_3", "ckp_1")
    assert server.body(1) == {"count": 2, "at": "ckp_1"}
    assert left.turn("Hi").text == "Left"


def test_partial_answers_update_what_they_name() -> None:
    """An answer that says only the status leaves the rest of the session as it was."""
    server = ScriptedServer(session(head="ckp_7"), httpx.Response(200, json={"status": "closed"}))
    conversation = server.client().sessions.create(model="base")

    conversation.close()

    assert (conversation.status, conversation.head, conversation.id) == ("closed", "ckp_7", "ses_1")
