"""Tests of the session service: tool calls and their outputs."""

import asyncio

import pytest

from graftwork.platform.errors import (
    Conflict,
    LimitExceeded,
    NotFound,
    Unavailable,
)
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.session import SessionStatus, TurnStatus
from graftwork.sessions.core.views import turn_answer
from graftwork.sessions.turns.runner import ToolHint
from tests.sessions.session_process import WEATHER, Answer, SessionProcess, call, principal, session_with_open_call

ALL_ITEMS = PageRequest(limit=100, order=Order.ASCENDING)


async def test_tool_outputs_in_any_order_start_the_next_turn(process: SessionProcess) -> None:
    """Outputs are kept, the last missing one starts the turn, and the prompt has them in the order of the calls."""
    me = principal()
    session = await process.session(me, tools=(WEATHER,))
    process.will_say(call("get_weather", city="Oslo") + call("get_weather", city="Rome"), "Cold and warm")

    turn = await (await process.service.start_turn(me, session.session_id, "Weather?")).result()
    oslo, rome = (item.call_id for item in turn.output)
    partial = await process.service.tool_outputs.send(me, session.session_id, [{"call_id": rome, "output": "warm"}])
    last = await process.service.tool_outputs.send(me, session.session_id, [{"call_id": oslo, "output": "cold"}])

    assert turn_answer(turn).status == "awaiting_tool"
    assert [call.arguments for call in turn_answer(turn).tool_calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert (partial.missing, partial.turn) == ((oslo,), None)
    assert last.turn is not None
    assert (await last.turn.result()).output[0].text == "Cold and warm"
    items = (await process.service.items(me, session.session_id, ALL_ITEMS)).items
    assert [item.type.value for item in items] == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    assert [item.call_id for item in items[3:5]] == [oslo, rome]


async def test_output_sent_again(process: SessionProcess) -> None:
    """A repeated output is answered with the stored one and its turn; a different one is a conflict."""
    me, session_id, call_id = await session_with_open_call(process)
    outputs = [{"call_id": call_id, "output": "cold"}]

    first = await process.service.tool_outputs.send(me, session_id, outputs)
    assert first.turn is not None
    await first.turn.result()
    again = await process.service.tool_outputs.send(me, session_id, outputs)

    assert again.outputs == first.outputs
    assert again.turn is not None
    assert again.turn.turn_id == first.turn.turn_id
    assert (await again.turn.result()).status is TurnStatus.COMPLETED
    with pytest.raises(Conflict) as caught:
        await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "warm"}])
    assert caught.value.code == "tool_output_differs"
    assert len(process.engine.requests) == 2


async def test_outputs_that_arrive_twice_at_once_start_one_turn(process_on_either: SessionProcess) -> None:
    """Of two requests with the last missing output, one starts the turn and the other answers the same turn."""
    process = process_on_either
    me, session_id, call_id = await session_with_open_call(process)
    outputs = [{"call_id": call_id, "output": "cold"}]

    both = await asyncio.gather(*(process.service.tool_outputs.send(me, session_id, outputs) for _ in range(2)))

    turns = [answer.turn for answer in both if answer.turn is not None]
    assert len(turns) == 2
    assert turns[0].turn_id == turns[1].turn_id
    for turn in turns:
        assert (await turn.result()).status is TurnStatus.COMPLETED
    assert len(process.engine.requests) == 2


async def test_unknown_call(process: SessionProcess) -> None:
    """An unknown call id is a NotFound, whatever characters it has."""
    me, session_id, _ = await session_with_open_call(process)

    for stranger in ("call_nobody", "call\x00"):
        with pytest.raises(NotFound):
            await process.service.tool_outputs.send(me, session_id, [{"call_id": stranger, "output": ""}])


async def test_user_turn_while_tools_are_awaited(process: SessionProcess) -> None:
    """A user's turn is refused while calls are unanswered, and the refusal names them."""
    me, session_id, call_id = await session_with_open_call(process)

    with pytest.raises(Conflict) as caught:
        await process.service.start_turn(me, session_id, "Never mind")

    assert call_id in caught.value.message
    assert caught.value.details == {"call_ids": [call_id]}


async def test_failed_tool_turn_is_tried_again_by_the_same_outputs(process: SessionProcess) -> None:
    """If the turn that used the outputs fails, they stay, and sending one again starts another turn."""
    me, session_id, call_id = await session_with_open_call(process, Answer(failure=Unavailable("gone")), "Cold")
    outputs = [{"call_id": call_id, "output": "cold"}]

    first = await process.service.tool_outputs.send(me, session_id, outputs)
    assert first.turn is not None
    failed = await first.turn.result()
    between = await process.load(me, session_id)
    second = await process.service.tool_outputs.send(me, session_id, outputs)

    assert failed.status is TurnStatus.FAILED
    assert between.status is SessionStatus.AWAITING_TOOL
    assert second.turn is not None
    assert (await second.turn.result()).status is TurnStatus.COMPLETED
    items = (await process.service.items(me, session_id, ALL_ITEMS)).items
    assert [item.type.value for item in items].count("function_call_output") == 1


async def test_refused_admission_keeps_the_outputs(process: SessionProcess) -> None:
    """A tenant over its limit may store an output, but not start a turn with it."""
    me, session_id, call_id = await session_with_open_call(process)
    outputs = [{"call_id": call_id, "output": "cold"}]
    process.quotas.is_shut = True

    with pytest.raises(LimitExceeded):
        await process.service.tool_outputs.send(me, session_id, outputs)
    process.quotas.is_shut = False
    answer = await process.service.tool_outputs.send(me, session_id, outputs)

    assert answer.turn is not None
    assert (await answer.turn.result()).status is TurnStatus.COMPLETED


async def test_ledger_notes_when_an_output_is_due(process_on_either: SessionProcess) -> None:
    """A deadline counts from the end of the calling turn; a late output is accepted, and a fork has no deadline."""
    process, me = process_on_either, principal()
    session = await process.session(me, tools=(WEATHER,))
    process.will_say(call("get_weather") + call("get_weather"))
    hints = {"get_weather": ToolHint(800.0, deadline_ms=5000.0)}
    await (await process.service.start_turn(me, session.session_id, "Weather?", tool_hints=hints)).result()
    due = process.clock.now() + 5.0

    (fork,) = await process.service.fork(me, session.session_id)
    ledger = (await process.load(me, session.session_id)).ledger
    process.clock.advance(60.0)
    outputs = [{"call_id": line.call_id, "output": "cold"} for line in ledger]
    late = await process.service.tool_outputs.send(me, session.session_id, outputs)

    assert [line.deadline_at for line in ledger] == [due, due]
    assert [line.deadline_at for line in fork.ledger] == [None, None]
    assert late.turn is not None
    assert (await late.turn.result()).status is TurnStatus.COMPLETED
