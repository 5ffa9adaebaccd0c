"""Tests of the session service: forks, rewinds, and turns of processes that ended."""

import pytest

from graftwork.platform.errors import (
    Conflict,
    NotFound,
    Unavailable,
)
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.session import SessionStatus, TurnStatus
from tests.sessions.session_process import (
    WEATHER,
    Answer,
    SessionProcess,
    call,
    crash,
    principal,
    session_with_open_call,
    types,
)

ALL_ITEMS = PageRequest(limit=100, order=Order.ASCENDING)


async def test_recovery_after_a_crash(process: SessionProcess) -> None:
    """A start after a crash fails the interrupted turn with a typed event, and the head stays."""
    me, session_id, call_id = await session_with_open_call(process, Answer("Cold", waits=True))
    head = (await process.load(me, session_id)).head_id
    await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    await process.engine.half_way.wait()
    await crash()
    next_process = process.restarted()

    recovered = await next_process.service.recover()

    events = await next_process.events(me, session_id)
    session = await next_process.load(me, session_id)
    assert recovered == 1
    assert types(events)[-1] == "turn.failed"
    assert events[-1].fields["error"]["code"] == "turn_interrupted"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert (session.status, session.head_id) == (SessionStatus.AWAITING_TOOL, head)
    again = await next_process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    assert again.turn is not None
    assert (await again.turn.result()).status is TurnStatus.COMPLETED
    assert await next_process.service.recover() == 0


async def test_other_processes_turns_are_left_alone_until_their_lease_ends(process_on_either: SessionProcess) -> None:
    """Another process takes a running turn over only after its lease has expired."""
    process = process_on_either
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(waits=True))
    running = await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()
    await process.until_delivered(me, session.session_id)  # storing events renews the lease
    other = process.restarted("second")

    before = (await other.service.recover(), (await other.load(me, session.session_id)).status)
    process.clock.advance(31)
    after = (await other.load(me, session.session_id)).status
    process.engine.go_on()

    assert before == (0, SessionStatus.RUNNING)
    assert after is SessionStatus.IDLE
    assert (await running.result()).status is TurnStatus.FAILED
    events = await other.events(me, session.session_id)
    assert types(events).count("turn.failed") == 1
    assert types(events)[-1] == "turn.failed"
    assert (await process.load(me, session.session_id)).head_id is None


async def test_shutdown_fails_running_turns(process: SessionProcess) -> None:
    """Closing the service fails its turns with a typed event, and later turns are refused."""
    me = principal()
    session = await process.session(me)
    process.will_say(Answer(waits=True))
    running = await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()

    await process.service.close()

    turn = await running.result()
    assert turn.error is not None
    assert (turn.status, turn.error["code"]) == (TurnStatus.FAILED, "shutting_down")
    with pytest.raises(Unavailable):
        await process.service.start_turn(me, session.session_id, "Hi")


async def test_forks_share_only_the_history_before_them(process: SessionProcess) -> None:
    """Forks continue the same prompt, and do not see each other's items."""
    me = principal()
    session = await process.session(me)
    await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    parent = await process.load(me, session.session_id)

    left, right = await process.service.fork(me, session.session_id, count=2)
    await (await process.service.start_turn(me, left.session_id, "Left")).result()
    await (await process.service.start_turn(me, right.session_id, "Right")).result()

    first, of_left, of_right = (request.prompt_token_ids for request in process.engine.requests)
    assert of_left[: len(first)] == of_right[: len(first)] == first
    texts = [item.text for item in (await process.service.items(me, right.session_id, ALL_ITEMS)).items]
    assert texts == ["Hi", "ok", "Right", "ok"]
    assert (await process.load(me, session.session_id)).head_id == parent.head_id
    assert (await process.events(me, left.session_id))[0].seq == 1


async def test_fork_of_awaited_calls_awaits_them_again(process: SessionProcess) -> None:
    """Each fork of a session that awaits tools takes its own outputs."""
    me, session_id, call_id = await session_with_open_call(process)
    (child,) = await process.service.fork(me, session_id)

    mine = await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    its = await process.service.tool_outputs.send(me, child.session_id, [{"call_id": call_id, "output": "warm"}])

    assert child.status is SessionStatus.AWAITING_TOOL
    assert mine.turn is not None
    assert its.turn is not None
    await mine.turn.result()
    await its.turn.result()
    (grandchild,) = await process.service.fork(me, child.session_id)
    same = await process.service.tool_outputs.send(me, grandchild.session_id, [{"call_id": call_id, "output": "warm"}])
    assert same.turn is None
    with pytest.raises(Conflict):
        await process.service.tool_outputs.send(me, grandchild.session_id, [{"call_id": call_id, "output": "cold"}])


async def test_rewind(process: SessionProcess) -> None:
    """A rewind moves the head to any checkpoint of the session; others are a NotFound."""
    me = principal()
    session = await process.session(me)
    first = await (await process.service.start_turn(me, session.session_id, "One")).result()
    second = await (await process.service.start_turn(me, session.session_id, "Two")).result()
    (child,) = await process.service.fork(me, session.session_id)
    later = await (await process.service.start_turn(me, session.session_id, "Three")).result()
    assert first.checkpoint_id
    assert second.checkpoint_id
    assert later.checkpoint_id

    back = await process.service.rewind(me, session.session_id, first.checkpoint_id)
    forth = await process.service.rewind(me, session.session_id, later.checkpoint_id)
    of_child = await process.service.rewind(me, child.session_id, first.checkpoint_id)

    assert [back.head_id, forth.head_id, of_child.head_id] == [
        first.checkpoint_id,
        later.checkpoint_id,
        first.checkpoint_id,
    ]
    for unknown in (later.checkpoint_id, "ckp_none", "ckp\x00", ""):
        with pytest.raises(NotFound):
            await process.service.rewind(me, child.session_id, unknown)


async def test_rewind_to_answered_calls_awaits_them_again(process: SessionProcess) -> None:
    """After a rewind to answered calls, they await outputs again; the old branch keeps its outputs."""
    me, session_id, call_id = await session_with_open_call(process)
    asked = (await process.load(me, session_id)).head_id
    first = await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    assert first.turn is not None
    await first.turn.result()
    assert asked is not None

    back = await process.service.rewind(me, session_id, asked)
    second = await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "warm"}])

    assert (back.status, back.awaited_call_ids) == (SessionStatus.AWAITING_TOOL, (call_id,))
    assert second.turn is not None
    await second.turn.result()
    items = (await process.service.items(me, session_id, ALL_ITEMS)).items
    assert [item.body["output"] for item in items if "output" in item.body] == ["warm"]


async def test_late_output_after_a_rewind(process: SessionProcess) -> None:
    """An output for a call that is no longer at the head is a conflict."""
    me = principal()
    session = await process.session(me, tools=(WEATHER,))
    process.will_say("Hello", call("get_weather"))
    first = await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    second = await (await process.service.start_turn(me, session.session_id, "Weather?")).result()
    assert first.checkpoint_id
    await process.service.rewind(me, session.session_id, first.checkpoint_id)

    with pytest.raises(Conflict) as caught:
        await process.service.tool_outputs.send(
            me, session.session_id, [{"call_id": second.output[0].call_id, "output": "late"}]
        )

    assert caught.value.code == "call_not_awaited"
