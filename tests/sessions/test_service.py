"""The session service, as the routes use it."""

import asyncio
import hashlib

import pytest
from sqlalchemy import text

from graftwork.engine.core.session_commands import SessionMemory
from graftwork.platform.database import Database
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    LimitExceeded,
    NotFound,
    Unavailable,
    ValidationFailed,
)
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.metering import UsageGroup
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import AgentSession, SessionSettings, SessionStatus, TurnStatus
from graftwork.sessions.core.views import session_answer, session_cache_answer, turn_answer
from graftwork.sessions.service import NewSession
from graftwork.sessions.text.messages import Message
from graftwork.sessions.turns.runner import ToolHint
from graftwork.sessions.turns.settings import TurnOverrides
from tests.sessions.fakes_sessions import (
    MAX_ANSWERS,
    WEATHER,
    Answer,
    World,
    call,
    crash,
    new_principal,
    principal,
    types,
)
from tests.sessions.fakes_text import description, prompt_encoder, text_tokenizer

ALL_ITEMS = PageRequest(limit=100, order=Order.ASCENDING)


@pytest.fixture
async def world(sqlite_database: Database) -> World:
    return World(sqlite_database)


@pytest.fixture
async def world_on_either(database: Database) -> World:
    """A world on SQLite, then one on PostgreSQL."""
    return World(database)


async def test_turn_answers_and_moves_the_head(world: World) -> None:
    """A turn ends with the model's message, a checkpoint as the new head, and correct figures."""
    me = principal()
    session = await world.session(me, instructions="Be brief.")
    world.will_say("Hello there")

    turn = await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    body = turn_answer(turn).body()
    after = await world.load(me, session.session_id)
    assert body["status"] == "completed"
    assert body["output"][0]["content"] == [{"type": "output_text", "text": "Hello there", "annotations": []}]
    assert after.head_id == turn.checkpoint_id
    assert after.status is SessionStatus.IDLE
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] + details["recomputed_tokens"] == body["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] == len(world.engine.requests[0].prompt_token_ids)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["cache"]["miss_reason"] is None
    absent = session_cache_answer(after, None, 0.0).body()
    assert absent["tiers"]["device"] == {"tokens": 4, "bytes": None}
    there = session_cache_answer(after, SessionMemory(host_tokens=16, host_bytes=100, lease_s=2.0), 1000.0).body()
    assert there["tiers"]["host"] == {"tokens": 16, "bytes": 100}
    assert there["lease"] == {"tier": "device", "seconds": 2.0, "until": 1002.0}


async def test_second_prompt_continues_the_first_bit_for_bit(world: World) -> None:
    """The second turn's prompt is the first prompt, the model's own tokens, and then the new items."""
    me = principal()
    session = await world.session(me)
    world.will_say("Hello  there")  # two spaces: another tokenizer's choice would show

    await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    await (await world.service.start_turn(me, session.session_id, "Again")).result()

    first, second = (request.prompt_token_ids for request in world.engine.requests)
    generated = (*text_tokenizer().encode("Hello  there", allow_special=True), *_end())
    delta = prompt_encoder().encode_delta(Message("assistant", "Hello  there"), [Message("user", "Again")], closed=True)
    assert second == (*first, *generated, *delta)


async def test_answer_that_was_cut_off_is_closed_by_the_next_prompt(world: World) -> None:
    """After an answer cut at its token limit, the next prompt closes it, and its item is `incomplete`."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer("Once upon", ends=False))

    turn = await (await world.service.start_turn(me, session.session_id, "Tell")).result()
    await (await world.service.start_turn(me, session.session_id, "Go on")).result()

    assert turn.finish_reason == "length"
    assert turn.output[0].body["status"] == "incomplete"
    first, second = (request.prompt_token_ids for request in world.engine.requests)
    written = text_tokenizer().decode(second[len(first) :], skip_special_tokens=False)
    assert written.startswith("Once upon<|im_end|>\n<|im_start|>user\nGo on<|im_end|>")


async def test_events_of_a_turn(world: World) -> None:
    """The events start with turn.created, contain the answer, end with one terminal event and count from 1."""
    me = principal()
    session = await world.session(me)
    world.will_say("Hello there")

    running = await world.service.start_turn(me, session.session_id, "Hi")
    live = [event async for event in running.events()]

    assert [event.seq for event in live] == list(range(1, len(live) + 1))
    assert types(live)[0] == "turn.created"
    assert types(live)[-1] == "turn.completed"
    assert "".join(event.fields.get("delta", "") for event in live) == "Hello there"
    assert live == await world.events(me, session.session_id)
    assert live[0].data().keys() == {"type", "seq", "session_id", "turn_id", "cache"}
    assert live[-1].data()["checkpoint_id"] == (await running.result()).checkpoint_id


async def test_tool_outputs_in_any_order_start_the_next_turn(world: World) -> None:
    """Outputs are kept, the last missing one starts the turn, and the prompt has them in the order of the calls."""
    me = principal()
    session = await world.session(me, tools=(WEATHER,))
    world.will_say(call("get_weather", city="Oslo") + call("get_weather", city="Rome"), "Cold and warm")

    turn = await (await world.service.start_turn(me, session.session_id, "Weather?")).result()
    oslo, rome = (item.call_id for item in turn.output)
    partial = await world.service.tool_outputs.send(me, session.session_id, [{"call_id": rome, "output": "warm"}])
    last = await world.service.tool_outputs.send(me, session.session_id, [{"call_id": oslo, "output": "cold"}])

    assert turn_answer(turn).status == "awaiting_tool"
    assert [call.arguments for call in turn_answer(turn).tool_calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert (partial.missing, partial.turn) == ((oslo,), None)
    assert last.turn is not None
    assert (await last.turn.result()).output[0].text == "Cold and warm"
    items = (await world.service.items(me, session.session_id, ALL_ITEMS)).items
    assert [item.type.value for item in items] == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    assert [item.call_id for item in items[3:5]] == [oslo, rome]


async def test_output_sent_again(world: World) -> None:
    """A repeated output is answered with the stored one and its turn; a different one is a conflict."""
    me, session_id, call_id = await _awaiting(world)
    outputs = [{"call_id": call_id, "output": "cold"}]

    first = await world.service.tool_outputs.send(me, session_id, outputs)
    assert first.turn is not None
    await first.turn.result()
    again = await world.service.tool_outputs.send(me, session_id, outputs)

    assert again.outputs == first.outputs
    assert again.turn is not None
    assert again.turn.turn_id == first.turn.turn_id
    assert (await again.turn.result()).status is TurnStatus.COMPLETED
    with pytest.raises(Conflict) as caught:
        await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "warm"}])
    assert caught.value.code == "tool_output_differs"
    assert len(world.engine.requests) == 2


async def test_outputs_that_arrive_twice_at_once_start_one_turn(world_on_either: World) -> None:
    """Of two requests with the last missing output, one starts the turn and the other answers the same turn."""
    world = world_on_either
    me, session_id, call_id = await _awaiting(world)
    outputs = [{"call_id": call_id, "output": "cold"}]

    both = await asyncio.gather(*(world.service.tool_outputs.send(me, session_id, outputs) for _ in range(2)))

    turns = [answer.turn for answer in both if answer.turn is not None]
    assert len(turns) == 2
    assert turns[0].turn_id == turns[1].turn_id
    for turn in turns:
        assert (await turn.result()).status is TurnStatus.COMPLETED
    assert len(world.engine.requests) == 2


async def test_unknown_call(world: World) -> None:
    """An unknown call id is a NotFound, whatever characters it has."""
    me, session_id, _ = await _awaiting(world)

    for stranger in ("call_nobody", "call\x00"):
        with pytest.raises(NotFound):
            await world.service.tool_outputs.send(me, session_id, [{"call_id": stranger, "output": ""}])


async def test_user_turn_while_tools_are_awaited(world: World) -> None:
    """A user's turn is refused while calls are unanswered, and the refusal names them."""
    me, session_id, call_id = await _awaiting(world)

    with pytest.raises(Conflict) as caught:
        await world.service.start_turn(me, session_id, "Never mind")

    assert call_id in caught.value.message
    assert caught.value.details == {"call_ids": [call_id]}


async def test_failed_tool_turn_is_tried_again_by_the_same_outputs(world: World) -> None:
    """If the turn that used the outputs fails, they stay, and sending one again starts another turn."""
    me, session_id, call_id = await _awaiting(world, Answer(failure=Unavailable("gone")), "Cold")
    outputs = [{"call_id": call_id, "output": "cold"}]

    first = await world.service.tool_outputs.send(me, session_id, outputs)
    assert first.turn is not None
    failed = await first.turn.result()
    between = await world.load(me, session_id)
    second = await world.service.tool_outputs.send(me, session_id, outputs)

    assert failed.status is TurnStatus.FAILED
    assert between.status is SessionStatus.AWAITING_TOOL
    assert second.turn is not None
    assert (await second.turn.result()).status is TurnStatus.COMPLETED
    items = (await world.service.items(me, session_id, ALL_ITEMS)).items
    assert [item.type.value for item in items].count("function_call_output") == 1


async def test_refused_admission_keeps_the_outputs(world: World) -> None:
    """A tenant over its limit may store an output, but not start a turn with it."""
    me, session_id, call_id = await _awaiting(world)
    outputs = [{"call_id": call_id, "output": "cold"}]
    world.quotas.is_shut = True

    with pytest.raises(LimitExceeded):
        await world.service.tool_outputs.send(me, session_id, outputs)
    world.quotas.is_shut = False
    answer = await world.service.tool_outputs.send(me, session_id, outputs)

    assert answer.turn is not None
    assert (await answer.turn.result()).status is TurnStatus.COMPLETED


async def test_second_turn_while_one_runs(world: World) -> None:
    """A session runs one turn at a time."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(waits=True))

    running = await world.service.start_turn(me, session.session_id, "Hi")
    await world.engine.half_way.wait()
    with pytest.raises(Conflict) as caught:
        await world.service.start_turn(me, session.session_id, "Hi again")
    world.engine.go_on()

    assert caught.value.details == {"turn_id": running.turn_id}
    assert (await running.result()).status is TurnStatus.COMPLETED


async def test_turns_that_start_at_once(world_on_either: World) -> None:
    """Of several turns that start at once exactly one runs, and the others get a refund."""
    world = world_on_either
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(waits=True))

    started = await asyncio.gather(
        *(world.service.start_turn(me, session.session_id, "Hi") for _ in range(4)), return_exceptions=True
    )
    await world.engine.half_way.wait()
    world.engine.go_on()

    running = [turn for turn in started if not isinstance(turn, BaseException)]
    assert len(running) == 1
    assert all(isinstance(turn, Conflict) for turn in started if turn is not running[0])
    await running[0].result()
    assert [reservation.settled is None for reservation in world.quotas.reservations].count(False) == 1
    assert all(reservation.settled is not None or reservation.is_refunded for reservation in world.quotas.reservations)


async def test_if_head(world: World) -> None:
    """A turn with an old `if_head` is refused, and the error tells the present head."""
    me = principal()
    session = await world.session(me)
    turn = await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    with pytest.raises(Conflict) as caught:
        await world.service.start_turn(me, session.session_id, "Hi", if_head="ckp_other")
    await (await world.service.start_turn(me, session.session_id, "Hi", if_head=turn.checkpoint_id)).result()

    assert caught.value.details == {"head": turn.checkpoint_id}


async def test_cancel(world: World) -> None:
    """A cancel ends the turn and the engine's request, and the head stays."""
    me = principal()
    session = await world.session(me)
    await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    head = (await world.load(me, session.session_id)).head_id
    world.will_say(Answer("A long story", waits=True))

    running = await world.service.start_turn(me, session.session_id, "Tell")
    await world.engine.half_way.wait()
    after = await world.service.cancel(me, session.session_id)

    assert (await running.result()).status is TurnStatus.CANCELLED
    assert (after.status, after.head_id) == (SessionStatus.IDLE, head)
    assert world.engine.cancelled == [running.turn_id]
    assert types(await world.events(me, session.session_id))[-1] == "turn.cancelled"
    assert (await world.service.cancel(me, session.session_id)).status is SessionStatus.IDLE


async def test_cancelled_turn_is_charged_for_generated_tokens(world: World) -> None:
    """A cancelled turn is charged for its prompt and the tokens generated before the cancel."""
    me = new_principal()
    session = await world.session(me)
    world.will_say(Answer("A long story", waits=True))

    await world.service.start_turn(me, session.session_id, "Tell")
    await world.engine.half_way.wait()
    await world.service.cancel(me, session.session_id)

    made = (len(text_tokenizer().encode("A long story", allow_special=True)) + 1) // 2
    rows = await world.meter.summarise(me.tenant_id, 0.0, 1e12, UsageGroup.SESSION)
    assert [(row.group, row.requests, row.completion_tokens) for row in rows] == [(session.session_id, 1, made)]
    assert world.quotas.reservations[0].settled == len(world.engine.requests[0].prompt_token_ids) + made


async def test_turn_continues_without_its_reader(world: World) -> None:
    """A turn continues when its reader leaves, and a reader that comes back misses nothing."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer("A long story", waits=True))

    running = await world.service.start_turn(me, session.session_id, "Tell")
    reader = running.events()
    first = await anext(reader)
    await reader.aclose()
    await world.engine.half_way.wait()
    world.engine.go_on()

    assert (await running.result()).status is TurnStatus.COMPLETED
    rest = await world.events(me, session.session_id, after=first.seq)
    assert [first, *rest] == await world.events(me, session.session_id)


async def test_readers_follow_a_running_turn(world: World) -> None:
    """Readers that start at different times see the same events to the end."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer("A long story", waits=True))

    await world.service.start_turn(me, session.session_id, "Tell")
    early = asyncio.create_task(world.events(me, session.session_id))
    await world.engine.half_way.wait()
    late = asyncio.create_task(world.events(me, session.session_id))
    await asyncio.sleep(0)
    world.engine.go_on()

    assert await early == await late == await world.events(me, session.session_id)


async def test_refusal_before_admission(world: World) -> None:
    """A refusal by the engine is raised by `admitted`, and is the turn's terminal event."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(refusal=CapacityContended("The queue is full.", retry_after_s=2.0)))

    running = await world.service.start_turn(me, session.session_id, "Hi")
    with pytest.raises(CapacityContended):
        await running.admitted()

    assert types([event async for event in running.events()]) == ["turn.created", "turn.failed"]
    assert (await running.result()).error == {
        "message": "The queue is full.",
        "type": "overloaded_error",
        "param": None,
        "code": "queue_full",
    }
    assert world.quotas.reservations[0].is_refunded


async def test_a_turn_that_the_engine_has_no_room_for_is_refused_at_once(world: World) -> None:
    """With as many answers in flight as the tenant may have, a turn is refused and nothing is stored; its place comes
    back when a turn ends.
    """
    me = principal()
    session = await world.session(me)
    with world.accounting.take_places(me.tenant_id, MAX_ANSWERS), pytest.raises(CapacityContended):
        await world.service.start_turn(me, session.session_id, "Hi")

    running = await world.service.start_turn(me, session.session_id, "Hi")
    assert (await running.result()).status is TurnStatus.COMPLETED
    await world.service.close()

    world.accounting.take_places(me.tenant_id, MAX_ANSWERS)
    assert len((await world.service.items(me, session.session_id, ALL_ITEMS)).items) == 2


async def test_bug_fails_the_turn(world: World) -> None:
    """An unexpected error fails the turn, and its text is not shown."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(bug=ZeroDivisionError("secret")))

    running = await world.service.start_turn(me, session.session_id, "Hi")
    await running.admitted()
    turn = await running.result()

    assert turn.status is TurnStatus.FAILED
    assert turn.error is not None
    assert turn.error["code"] == "internal_error"
    assert "secret" not in turn.error["message"]
    assert (await world.load(me, session.session_id)).status is SessionStatus.IDLE


async def test_recovery_after_a_crash(world: World) -> None:
    """A start after a crash fails the interrupted turn with a typed event, and the head stays."""
    me, session_id, call_id = await _awaiting(world, Answer("Cold", waits=True))
    head = (await world.load(me, session_id)).head_id
    await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    await world.engine.half_way.wait()
    await crash()
    next_process = world.restarted()

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


async def test_other_processes_turns_are_left_alone_until_their_lease_ends(world_on_either: World) -> None:
    """Another process takes a running turn over only after its lease has expired."""
    world = world_on_either
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(waits=True))
    running = await world.service.start_turn(me, session.session_id, "Hi")
    await world.engine.half_way.wait()
    other = world.restarted("second")

    before = (await other.service.recover(), (await other.load(me, session.session_id)).status)
    world.clock.advance(31)
    after = (await other.load(me, session.session_id)).status
    world.engine.go_on()

    assert before == (0, SessionStatus.RUNNING)
    assert after is SessionStatus.IDLE
    assert (await running.result()).status is TurnStatus.FAILED
    events = await other.events(me, session.session_id)
    assert types(events).count("turn.failed") == 1
    assert types(events)[-1] == "turn.failed"
    assert (await world.load(me, session.session_id)).head_id is None


async def test_shutdown_fails_running_turns(world: World) -> None:
    """Closing the service fails its turns with a typed event, and later turns are refused."""
    me = principal()
    session = await world.session(me)
    world.will_say(Answer(waits=True))
    running = await world.service.start_turn(me, session.session_id, "Hi")
    await world.engine.half_way.wait()

    await world.service.close()

    turn = await running.result()
    assert turn.error is not None
    assert (turn.status, turn.error["code"]) == (TurnStatus.FAILED, "shutting_down")
    with pytest.raises(Unavailable):
        await world.service.start_turn(me, session.session_id, "Hi")


async def test_forks_share_only_the_history_before_them(world: World) -> None:
    """Forks continue the same prompt, and do not see each other's items."""
    me = principal()
    session = await world.session(me)
    await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    parent = await world.load(me, session.session_id)

    left, right = await world.service.fork(me, session.session_id, count=2)
    await (await world.service.start_turn(me, left.session_id, "Left")).result()
    await (await world.service.start_turn(me, right.session_id, "Right")).result()

    first, of_left, of_right = (request.prompt_token_ids for request in world.engine.requests)
    assert of_left[: len(first)] == of_right[: len(first)] == first
    texts = [item.text for item in (await world.service.items(me, right.session_id, ALL_ITEMS)).items]
    assert texts == ["Hi", "ok", "Right", "ok"]
    assert (await world.load(me, session.session_id)).head_id == parent.head_id
    assert (await world.events(me, left.session_id))[0].seq == 1


async def test_fork_of_awaited_calls_awaits_them_again(world: World) -> None:
    """Each fork of a session that awaits tools takes its own outputs."""
    me, session_id, call_id = await _awaiting(world)
    (child,) = await world.service.fork(me, session_id)

    mine = await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    its = await world.service.tool_outputs.send(me, child.session_id, [{"call_id": call_id, "output": "warm"}])

    assert child.status is SessionStatus.AWAITING_TOOL
    assert mine.turn is not None
    assert its.turn is not None
    await mine.turn.result()
    await its.turn.result()
    (grandchild,) = await world.service.fork(me, child.session_id)
    same = await world.service.tool_outputs.send(me, grandchild.session_id, [{"call_id": call_id, "output": "warm"}])
    assert same.turn is None
    with pytest.raises(Conflict):
        await world.service.tool_outputs.send(me, grandchild.session_id, [{"call_id": call_id, "output": "cold"}])


async def test_rewind(world: World) -> None:
    """A rewind moves the head to any checkpoint of the session; others are a NotFound."""
    me = principal()
    session = await world.session(me)
    first = await (await world.service.start_turn(me, session.session_id, "One")).result()
    second = await (await world.service.start_turn(me, session.session_id, "Two")).result()
    (child,) = await world.service.fork(me, session.session_id)
    later = await (await world.service.start_turn(me, session.session_id, "Three")).result()
    assert first.checkpoint_id
    assert second.checkpoint_id
    assert later.checkpoint_id

    back = await world.service.rewind(me, session.session_id, first.checkpoint_id)
    forth = await world.service.rewind(me, session.session_id, later.checkpoint_id)
    of_child = await world.service.rewind(me, child.session_id, first.checkpoint_id)

    assert [back.head_id, forth.head_id, of_child.head_id] == [
        first.checkpoint_id,
        later.checkpoint_id,
        first.checkpoint_id,
    ]
    for unknown in (later.checkpoint_id, "ckp_none", "ckp\x00", ""):
        with pytest.raises(NotFound):
            await world.service.rewind(me, child.session_id, unknown)


async def test_rewind_to_answered_calls_awaits_them_again(world: World) -> None:
    """After a rewind to answered calls, they await outputs again; the old branch keeps its outputs."""
    me, session_id, call_id = await _awaiting(world)
    asked = (await world.load(me, session_id)).head_id
    first = await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])
    assert first.turn is not None
    await first.turn.result()
    assert asked is not None

    back = await world.service.rewind(me, session_id, asked)
    second = await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "warm"}])

    assert (back.status, back.awaited_call_ids) == (SessionStatus.AWAITING_TOOL, (call_id,))
    assert second.turn is not None
    await second.turn.result()
    items = (await world.service.items(me, session_id, ALL_ITEMS)).items
    assert [item.body["output"] for item in items if "output" in item.body] == ["warm"]


async def test_late_output_after_a_rewind(world: World) -> None:
    """An output for a call that is no longer at the head is a conflict."""
    me = principal()
    session = await world.session(me, tools=(WEATHER,))
    world.will_say("Hello", call("get_weather"))
    first = await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    second = await (await world.service.start_turn(me, session.session_id, "Weather?")).result()
    assert first.checkpoint_id
    await world.service.rewind(me, session.session_id, first.checkpoint_id)

    with pytest.raises(Conflict) as caught:
        await world.service.tool_outputs.send(
            me, session.session_id, [{"call_id": second.output[0].call_id, "output": "late"}]
        )

    assert caught.value.code == "call_not_awaited"


async def test_adapter_version_is_pinned(world: World) -> None:
    """A session keeps its adapter version; a PATCH changes it and tells how much KV is lost."""
    me = principal()
    session = await world.service.create(me, NewSession("graft@1"))
    turn = await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    changed = await world.service.change(me, session.session_id, model="graft", metadata={"a": "b"})
    unchanged = await world.service.change(me, session.session_id, model="graft@2")
    await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    assert session_answer(session, "tiny").model.body() == {"name": "graft", "version": 1, "digest": "sha256:1"}
    assert [request.adapter_digests for request in world.engine.requests] == [("sha256:1",), ("sha256:2",)]
    assert turn.usage is not None
    assert changed.given_up_tokens == turn.usage["total_tokens"]
    assert changed.session.metadata == {"a": "b"}
    assert unchanged.given_up_tokens == 0
    with pytest.raises(NotFound):
        await world.service.create(me, NewSession("grfat"))


async def test_suspended_session_wakes(world: World) -> None:
    """A suspended session takes its next turn or tool output as usual."""
    me, session_id, call_id = await _awaiting(world)

    suspended = await world.service.suspend(me, session_id)
    answer = await world.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])

    assert suspended.status is SessionStatus.SUSPENDED
    assert answer.turn is not None
    assert (await answer.turn.result()).status is TurnStatus.COMPLETED
    await world.service.suspend(me, session_id)
    assert (await (await world.service.start_turn(me, session_id, "Hi")).result()).status is TurnStatus.COMPLETED


async def test_closed_session_is_read_only_until_its_time_is_up(world: World) -> None:
    """Closing cancels the turn and forbids changes; items and events are readable until the time to live ends."""
    me = principal()
    session = await world.service.create(me, NewSession("tiny", retention_s=60.0))
    await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    world.will_say(Answer(waits=True))
    running = await world.service.start_turn(me, session.session_id, "Hi")
    await world.engine.half_way.wait()

    closed = await world.service.close_session(me, session.session_id)

    assert closed.status is SessionStatus.CLOSED
    assert (await world.service.close_session(me, session.session_id)).closed_at == closed.closed_at
    assert (await running.result()).status is TurnStatus.CANCELLED
    with pytest.raises(Conflict):
        await world.service.start_turn(me, session.session_id, "Hi")
    with pytest.raises(Conflict):
        await world.service.fork(me, session.session_id)
    assert len((await world.service.items(me, session.session_id, ALL_ITEMS)).items) == 2
    world.clock.advance(60)
    with pytest.raises(NotFound):
        await world.load(me, session.session_id)


async def test_other_tenants_see_nothing(world_on_either: World) -> None:
    """Another tenant's sessions and checkpoints are a NotFound, like unknown ids."""
    world = world_on_either
    me, stranger = principal(), principal("ten_2")
    session = await world.session(me)
    turn = await (await world.service.start_turn(me, session.session_id, "Hi")).result()
    theirs = await world.session(stranger)
    assert turn.checkpoint_id

    for action in (
        world.load(stranger, session.session_id),
        world.service.start_turn(stranger, session.session_id, "Hi"),
        world.service.events(stranger, session.session_id),
        world.service.cancel(stranger, session.session_id),
        world.service.rewind(stranger, theirs.session_id, turn.checkpoint_id),
        world.load(stranger, "ses_\x00"),
    ):
        with pytest.raises(NotFound):
            await action
    listed = await world.service.list_sessions(stranger, PageRequest())
    assert [other.session_id for other in listed.items] == [theirs.session_id]


async def test_lists_are_paged(world_on_either: World) -> None:
    """Pages of sessions and items follow one another without a gap."""
    world = world_on_either
    me = principal()
    sessions = [(await world.session(me)).session_id for _ in range(3)]
    for words in ("One", "Two"):
        await (await world.service.start_turn(me, sessions[0], words)).result()

    pages = [await world.service.list_sessions(me, PageRequest(limit=2))]
    pages.append(await world.service.list_sessions(me, PageRequest(limit=2, after=pages[0].items[-1].session_id)))
    newest = await world.service.items(me, sessions[0], PageRequest(limit=1))
    older = await world.service.items(me, sessions[0], PageRequest(limit=9, after=newest.items[0].item_id))

    with pytest.raises(ValidationFailed):
        await world.service.list_sessions(me, PageRequest(after="\x00"))
    assert sorted(session.session_id for page in pages for session in page.items) == sorted(sessions)
    assert [page.has_more for page in pages] == [True, False]
    assert [item.text for item in (*newest.items, *older.items)] == ["ok", "Two", "ok", "One"]


async def test_full_context(world: World) -> None:
    """A prompt that fills the context is refused with both numbers, and nothing is stored."""
    me = principal()
    session = await world.session(me)

    with pytest.raises(ContextLengthExceeded) as caught:
        await world.service.start_turn(me, session.session_id, "x " * 2048)

    assert caught.value.details["context_tokens"] == 2048
    assert caught.value.details["prompt_tokens"] > 2048
    assert "2048" in caught.value.message
    assert (await world.load(me, session.session_id)).status is SessionStatus.IDLE
    assert world.quotas.reservations == []


async def test_overrides_hold_for_one_turn(world: World) -> None:
    """A turn's sampling and tool_choice override the session's for that turn only."""
    me = principal()
    session = await world.session(me, tools=(WEATHER,), sampling={"temperature": 0.5, "max_tokens": 7})
    world.will_say(call("get_weather"))
    only_text = TurnOverrides(tool_choice="none", sampling={"temperature": 0})

    text = await (await world.service.start_turn(me, session.session_id, "Hi", overrides=only_text)).result()
    await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    first, second = (request.sampling for request in world.engine.requests)
    assert (first.temperature, first.max_tokens) == (0, 7)
    assert (second.temperature, second.max_tokens) == (0.5, 7)
    assert text.status is TurnStatus.COMPLETED
    assert "<tool_call>" in text.output[0].text


async def test_turn_keeps_its_provenance(world: World) -> None:
    """A turn keeps the digests of weights, template and tokenizer, and the sampling as the engine got it."""
    me = principal()
    session = await world.service.create(me, NewSession("graft@1", SessionSettings(sampling={"seed": -1, "stop": "."})))

    turn = await (await world.service.start_turn(me, session.session_id, "Hi")).result()

    noted, encoder = turn.made_with, prompt_encoder()
    assert noted is not None
    assert (noted["base"], noted["adapter"]) == (description().fingerprint, "sha256:1")
    assert noted["template"] == "sha256:" + hashlib.sha256(encoder.template.source.encode()).hexdigest()
    assert noted["tokenizer"] == text_tokenizer().digest
    sent = world.engine.requests[0].sampling
    assert noted["sampling"]["seed"] == sent.seed == (1 << 64) - 1
    assert (noted["sampling"]["max_tokens"], noted["sampling"]["stop"]) == (sent.max_tokens, ["."])


async def test_ledger_notes_when_an_output_is_due(world_on_either: World) -> None:
    """A deadline counts from the end of the calling turn; a late output is accepted, and a fork has no deadline."""
    world, me = world_on_either, principal()
    session = await world.session(me, tools=(WEATHER,))
    world.will_say(call("get_weather") + call("get_weather"))
    hints = {"get_weather": ToolHint(800.0, deadline_ms=5000.0)}
    await (await world.service.start_turn(me, session.session_id, "Weather?", tool_hints=hints)).result()
    due = world.clock.now() + 5.0

    (fork,) = await world.service.fork(me, session.session_id)
    ledger = (await world.load(me, session.session_id)).ledger
    world.clock.advance(60.0)
    outputs = [{"call_id": line.call_id, "output": "cold"} for line in ledger]
    late = await world.service.tool_outputs.send(me, session.session_id, outputs)

    assert [line.deadline_at for line in ledger] == [due, due]
    assert [line.deadline_at for line in fork.ledger] == [None, None]
    assert late.turn is not None
    assert (await late.turn.result()).status is TurnStatus.COMPLETED


async def test_session_limit(world: World) -> None:
    """A tenant at its limit of sessions gets no new one until it closes one."""
    me = new_principal()
    world.quotas.limit = 2
    session = await world.session(me)

    with pytest.raises(LimitExceeded):
        await world.service.fork(me, session.session_id, count=2)
    await world.session(me)
    with pytest.raises(LimitExceeded):
        await world.session(me)
    await world.service.close_session(me, session.session_id)
    await world.session(me)


async def test_session_limit_holds_for_those_made_at_once(world_on_either: World) -> None:
    """Of many sessions created at once, exactly as many succeed as the limit allows."""
    world, me = world_on_either, new_principal()
    async with world.database.write() as database:
        await database.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES (:id, 'acme', 'active', 1, 'default', 0)"
            ),
            {"id": me.tenant_id},
        )
    world.quotas.limit = 3

    made = await asyncio.gather(*(world.session(me) for _ in range(8)), return_exceptions=True)

    assert sum(isinstance(outcome, AgentSession) for outcome in made) == 3
    assert sum(isinstance(outcome, LimitExceeded) for outcome in made) == 5


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        (SessionSettings(tool_choice="required"), "tool_choice"),
        (SessionSettings(response_format={"type": "xml"}), "response_format.type"),
        (
            SessionSettings(response_format={"type": "json_schema", "json_schema": {}}),
            "response_format.json_schema.schema",
        ),
        (SessionSettings(tools=({"type": "function", "function": {"name": "no spaces"}},)), "tools[0].function.name"),
        (SessionSettings(sampling={"temperature": 3}), "sampling.temperature"),
        (SessionSettings(sampling={"presence_penalty": 3}), "sampling.presence_penalty"),
        (SessionSettings(sampling={"n": 2}), "sampling.n"),
        (SessionSettings(sampling={"tempreature": 1}), "sampling.tempreature"),  # codespell:ignore
        (SessionSettings(tools=(WEATHER, WEATHER)), "tools[1].function.name"),
        (SessionSettings(instructions="\ud800"), "instructions"),
    ],
)
async def test_settings_that_are_not_served(sqlite_database: Database, settings: SessionSettings, param: str) -> None:
    """Settings that cannot be served are refused at creation with the field's name."""
    with pytest.raises(ValidationFailed) as caught:
        await World(sqlite_database).service.create(principal(), NewSession("tiny", settings))

    assert caught.value.param == param


async def test_tokens_that_the_model_has_not_are_refused(sqlite_database: Database) -> None:
    """A bias for an id outside the vocabulary is refused with the field's name, and the session stays idle."""
    world, me = World(sqlite_database), principal()
    session = await world.session(me)
    overrides = TurnOverrides(sampling={"logit_bias": {"1000000": 1}})

    with pytest.raises(ValidationFailed) as caught:
        await world.service.start_turn(me, session.session_id, "hi", overrides=overrides)

    assert caught.value.param == "sampling.logit_bias"
    assert (await world.load(me, session.session_id)).status == session.status


async def test_text_that_databases_choke_on(world_on_either: World) -> None:
    """A NUL character in a message, a tool's output or the instructions is kept."""
    world = world_on_either
    me = principal()
    session = await world.session(me, instructions="\x00", tools=(WEATHER,))
    world.will_say(call("get_weather"))
    turn = await (await world.service.start_turn(me, session.session_id, "a\x00b")).result()
    outputs = [{"call_id": turn.output[0].call_id, "output": {"a": "\x00"}}]

    answer = await world.service.tool_outputs.send(me, session.session_id, outputs)

    assert answer.turn is not None
    await answer.turn.result()
    items = (await world.service.items(me, session.session_id, ALL_ITEMS)).items
    assert items[0].text == "a\x00b"
    assert items[2].body["output"] == '{"a": "\\u0000"}'


def _end() -> tuple[int, ...]:
    return text_tokenizer().encode("<|im_end|>", allow_special=True)


async def _awaiting(world: World, *next_answers: Answer | str) -> tuple[Principal, str, str]:
    """Create a session whose first turn called one tool."""
    me = principal()
    session = await world.session(me, tools=(WEATHER,))
    world.will_say(call("get_weather", city="Oslo"), *next_answers)
    turn = await (await world.service.start_turn(me, session.session_id, "Weather?")).result()
    return me, session.session_id, turn.output[0].call_id
