"""A session object: turns, the tool loop, branches."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from graftwork.api.sdk.errors import ToolLoopError, TurnFailedError
from tests.sdk.scripted_server import ScriptedServer, session, turn


def call(call_id: str, name: str, **arguments: Any) -> dict[str, str]:
    return {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


def awaiting(*calls: dict[str, str]) -> httpx.Response:
    return turn("awaiting_tool", tool_calls=list(calls))


def test_run_answers_calls_until_the_end() -> None:
    """The calls of each turn are run and answered, and the last turn is the answer."""
    server = ScriptedServer(
        session(), awaiting(call("a", "add", x=1, y=2)), awaiting(call("b", "add", x=3, y=4)), turn(text="It is 10.")
    )
    talk = server.client().sessions.create(model="base")

    run = talk.run("Sum?", tools={"add": lambda x, y: {"sum": x + y}})

    assert run.text == "It is 10."
    assert len(run.turns) == 3
    assert server.body(2)["outputs"] == [{"call_id": "a", "output": '{"sum": 3}'}]
    assert server.body(3)["outputs"] == [{"call_id": "b", "output": '{"sum": 7}'}]
    assert talk.head == "ckp_1"


def test_calls_of_one_turn_run_side_by_side() -> None:
    """Two tools that wait for each other both come to an end."""
    meeting = threading.Barrier(2, timeout=5)
    server = ScriptedServer(session(), awaiting(call("a", "meet"), call("b", "meet")), turn(text="Done."))

    server.client().sessions.create(model="base").run("Meet", tools={"meet": lambda: str(meeting.wait())})

    assert [output["call_id"] for output in server.body(2)["outputs"]] == ["a", "b"]


def test_failures_are_answers() -> None:
    """An exception, a wrong name, wrong arguments and broken JSON all come back to the model as errors."""
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
    """Past its time a call is answered with an error, and the others keep their results."""
    server = ScriptedServer(session(), awaiting(call("a", "hang"), call("b", "quick")), turn(text="Late."))
    released = threading.Event()
    tools = {"hang": lambda: released.wait(30), "quick": lambda: "ok"}

    server.client().sessions.create(model="base").run("Go", tools=tools, tool_timeout=0.01)
    released.set()

    hung, quick = (output["output"] for output in server.body(2)["outputs"])
    assert json.loads(hung) == {"error": "hang did not answer within 0.01 seconds"}
    assert quick == "ok"


def test_endless_calls_are_stopped() -> None:
    """A model that never stops calling meets `max_rounds`."""
    server = ScriptedServer(session(), *[awaiting(call("a", "f")) for _ in range(4)])
    talk = server.client().sessions.create(model="base")

    with pytest.raises(ToolLoopError):
        talk.run("Loop", tools={"f": lambda: "x"}, max_rounds=3)

    assert len(server.requests) == 5


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_turn_without_an_answer_is_an_error(status: str) -> None:
    """`run` raises with the turn, so that its tokens are not lost."""
    server = ScriptedServer(session(), turn(status, error={"message": "engine gone"}))

    with pytest.raises(TurnFailedError, match="engine gone") as caught:
        server.client().sessions.create(model="base").run("Hi", tools={})

    assert caught.value.turn.status == status


async def test_async_tools_run_on_the_callers_loop() -> None:
    """In AsyncGraftwork, async and plain functions mix."""
    server = ScriptedServer(session(), awaiting(call("a", "slow"), call("b", "plain")), turn(text="Done."))
    loops = []

    async def slow() -> str:
        loops.append(asyncio.get_running_loop())
        return "slow"

    async with server.async_client() as client:
        talk = await client.sessions.create(model="base")
        run = await talk.run("Go", tools={"slow": slow, "plain": lambda: "plain"})

    assert run.text == "Done."
    assert loops == [asyncio.get_running_loop()]


def test_async_tools_work_in_the_plain_client() -> None:
    """A coroutine function is awaited there too."""
    server = ScriptedServer(session(), awaiting(call("a", "slow")), turn(text="Done."))

    async def slow() -> dict[str, int]:
        return {"x": 1}

    server.client().sessions.create(model="base").run("Go", tools={"slow": slow})

    assert server.body(2)["outputs"][0]["output"] == '{"x": 1}'


def test_turn_options_are_sent() -> None:
    """What a turn sets for itself stands beside its input."""
    server = ScriptedServer(session(), turn(text="Hi"))

    server.client().sessions.create(model="base").turn("Hi", if_head="ckp_0", sampling={"temperature": 0})

    expected = {"input": "Hi", "stream": False, "if_head": "ckp_0", "sampling": {"temperature": 0}}
    assert server.body(1) == expected


def test_branches_are_sessions() -> None:
    """A fork answers as many sessions as were asked for, each ready for a turn."""
    branches = [{"id": f"ses_{number}", "status": "idle", "head": "ckp_1"} for number in (2, 3)]
    server = ScriptedServer(session(), httpx.Response(201, json={"data": branches}), turn(text="Left"))

    left, right = server.client().sessions.create(model="base").fork(at="ckp_1", count=2)

    assert (left.id, right.id, right.head) == ("ses_2", "ses_3", "ckp_1")
    assert server.body(1) == {"count": 2, "at": "ckp_1"}
    assert left.turn("Hi").text == "Left"


def test_partial_answers_update_what_they_name() -> None:
    """An answer that says only the status leaves the rest of the session as it was."""
    server = ScriptedServer(session(head="ckp_7"), httpx.Response(200, json={"status": "closed"}))
    talk = server.client().sessions.create(model="base")

    talk.close()

    assert (talk.status, talk.head, talk.id) == ("closed", "ckp_7", "ses_1")
