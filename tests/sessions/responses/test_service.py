"""Tests of responses on sessions: their session, their prompt, and the rows that stay."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest, NotFound, ValidationFailed
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import CallId, RequestId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageGroup
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.idempotency import Attempt, IdempotencyStore, LineOfBatch, TurnClaim
from graftwork.sessions.core.items import function_call, function_call_output
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.responses.input import check_outputs
from graftwork.sessions.responses.record import NewResponse, turn_of
from graftwork.sessions.responses.store import ResponseStore
from graftwork.sessions.text.messages import Message, ToolCall
from tests.sessions.responses_driver import CALLS, ResponsesDriver, count_rows, outputs
from tests.sessions.session_process import END, WEATHER, Answer, SessionProcess, crash, principal
from tests.sessions.tokenizer_and_templates import prompt_encoder, text_tokenizer

ALL_ITEMS = PageRequest(limit=100, order=Order.ASCENDING)


@pytest.fixture
async def responses(sqlite_database: Database) -> ResponsesDriver:
    return ResponsesDriver(SessionProcess(sqlite_database))


@pytest.fixture
async def responses_on_either(database: Database) -> ResponsesDriver:
    """Responses on SQLite, then on PostgreSQL."""
    return ResponsesDriver(SessionProcess(database))


def encoded(*messages: Message, **fields: Any) -> tuple[int, ...]:
    """The token ids of a whole conversation, encoded by the template."""
    return prompt_encoder().encode_messages(messages, **fields)


async def test_going_on_continues_the_tokens_bit_for_bit(responses: ResponsesDriver) -> None:
    """The next prompt is the last prompt, the model's own tokens, and then the new items."""
    me, process = principal(), responses.process
    process.will_say("Hello  there")  # two spaces: another tokenizer's choice would show
    first = await responses.ask(me, instructions="Be brief.")

    await responses.ask(me, "Again", instructions="Be brief.", previous_response_id=first["id"])

    before, after = (request.prompt_token_ids for request in process.engine.requests)
    generated = (*text_tokenizer().encode("Hello  there", allow_special=True), END)
    delta = prompt_encoder().encode_delta(Message("assistant", "Hello  there"), [Message("user", "Again")], closed=True)
    assert after == (*before, *generated, *delta)
    assert (await count_rows(process.database))["sessions"] == 1


async def test_a_response_used_twice_forks(responses_on_either: ResponsesDriver) -> None:
    """Two branches share the history before them and nothing else, even if they start at once."""
    me, responses = principal(), responses_on_either
    process = responses.process
    first = await responses.ask(me)

    branches = await asyncio.gather(
        *(responses.ask(me, said, previous_response_id=first["id"]) for said in ("Left", "Right", "Middle"))
    )
    late = await responses.ask(me, "Late", previous_response_id=first["id"])

    prompts = [text_tokenizer().decode(request.prompt_token_ids) for request in process.engine.requests[1:]]
    shared = (*process.engine.requests[0].prompt_token_ids, *next(iter(process.engine.said.values())))
    assert all(request.prompt_token_ids[: len(shared)] == shared for request in process.engine.requests[1:])
    said = ("Left", "Right", "Middle", "Late")
    assert sorted([word for word in said if word in prompt] for prompt in prompts) == sorted([word] for word in said)
    assert len({body["id"] for body in (*branches, late)}) == 4
    assert (await count_rows(process.database))["sessions"] == 4


async def test_other_instructions_encode_the_history_again(responses: ResponsesDriver) -> None:
    """A response with other instructions or tools encodes the whole history again."""
    me, process = principal(), responses.process
    process.will_say("One", "Two", "Three", "Four")
    first = await responses.ask(me, "A", instructions="Be brief.")
    second = await responses.ask(me, "B", instructions="Be long.", previous_response_id=first["id"])
    third = await responses.ask(me, "C", instructions="Be long.", previous_response_id=second["id"])
    await responses.ask(me, "D", tools=(WEATHER,), previous_response_id=third["id"])

    _, longer, continued, with_tools = (request.prompt_token_ids for request in process.engine.requests)

    said = [Message("user", "A"), Message("assistant", "One"), Message("user", "B"), Message("assistant", "Two")]
    said += [Message("user", "C"), Message("assistant", "Three"), Message("user", "D")]
    assert longer == encoded(Message("system", "Be long."), *said[:3])
    assert continued == encoded(Message("system", "Be long."), *said[:5])
    assert continued[: len(longer)] == longer
    assert with_tools == encoded(*said, tools=[WEATHER])


async def test_the_history_is_kept_once_however_often_it_is_encoded(responses: ResponsesDriver) -> None:
    """A conversation lists each item once and in order, after changes of instructions and forks too."""
    me, process = principal(), responses.process
    conversations = ConversationService(process.service)
    conversation = await conversations.create(me, {})
    for number in range(4):
        last = await responses.ask(
            me, f"Turn {number}", instructions=f"Be {number % 2}", conversation_id=conversation.session_id
        )
    await responses.ask(me, "Aside", previous_response_id=last["id"])

    items = (await conversations.items(me, conversation.session_id, ALL_ITEMS)).items

    assert [item.text for item in items] == ["Turn 0", "ok", "Turn 1", "ok", "Turn 2", "ok", "Turn 3", "ok"]
    assert len({item.item_id for item in items}) == 8
    assert items[-1].item_id == last["output"][0]["id"]
    in_turn_3, aside = (request.prompt_token_ids for request in process.engine.requests[-2:])
    num_tokens = (await process.service.prefetch(me, conversation.session_id)).history_tokens
    assert num_tokens == len(in_turn_3) + len(process.engine.said[process.engine.requests[-2].request_id])
    assert aside == encoded(*[Message(item.body["role"], item.text) for item in items], Message("user", "Aside"))


async def test_another_model_continues_the_same_tokens(responses: ResponsesDriver) -> None:
    """Each response runs on the model that it names, with the same tokens of history."""
    me, process = principal(), responses.process
    conversation = await ConversationService(process.service).create(me, {})
    await responses.ask(me, conversation_id=conversation.session_id)

    await responses.ask(me, "Again", model="graft@1", conversation_id=conversation.session_id)

    before, after = process.engine.requests
    assert [adapter.digest for adapter in after.adapters] == ["sha256:1"]
    assert after.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
    assert (await process.load(me, conversation.session_id)).model.digest == "sha256:1"


async def test_outputs_answer_calls(responses: ResponsesDriver) -> None:
    """One response continues with the outputs of all calls, in their order, and with a message after them."""
    me, process = principal(), responses.process
    process.will_say(CALLS)
    first = await responses.ask(me, tools=(WEATHER,))
    answers = outputs(first)

    with pytest.raises(ValidationFailed, match=answers[1]["call_id"]):
        await responses.ask(me, answers[:1], tools=(WEATHER,), previous_response_id=first["id"])
    with pytest.raises(ValidationFailed, match="no call"):
        await responses.ask(me, [*answers, answers[0]], tools=(WEATHER,), previous_response_id=first["id"])
    thanks = {"role": "user", "content": "Thanks"}
    second = await responses.ask(me, [*answers, thanks], tools=(WEATHER,), previous_response_id=first["id"])
    other = await responses.ask(me, outputs(first, "warm"), tools=(WEATHER,), previous_response_id=first["id"])

    assert (second["status"], other["status"]) == ("completed", "completed")
    calls = tuple(ToolCall(item["call_id"], item["name"], item["arguments"]) for item in first["output"])
    delta = [Message("tool", "cold", tool_call_id=each.call_id, name="get_weather") for each in calls]
    asked = process.engine.requests[0].prompt_token_ids
    said = next(iter(process.engine.said.values()))
    new = prompt_encoder().encode_delta(
        Message("assistant", "", tool_calls=calls), [*delta, Message("user", "Thanks")], closed=True
    )
    assert process.engine.requests[1].prompt_token_ids == (*asked, *said, *new)
    assert "warm" in text_tokenizer().decode(process.engine.requests[2].prompt_token_ids)


async def test_a_client_may_remember_by_itself(responses: ResponsesDriver) -> None:
    """Without a previous response, the input may be a whole conversation with calls and outputs."""
    me = principal()
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "cold"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Cold."}]},
        {"role": "user", "content": "Thanks"},
    ]

    await responses.ask(me, history, tools=(WEATHER,))

    assert responses.process.engine.requests[0].prompt_token_ids == encoded(
        Message("user", "Weather?"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "get_weather", "{}"),)),
        Message("tool", "cold", tool_call_id="c1", name="get_weather"),
        Message("assistant", "Cold."),
        Message("user", "Thanks"),
        tools=[WEATHER],
    )


def test_every_call_has_one_output_after_it() -> None:
    """An output before its call, a second one, a missing one and a second call are refused with their position."""
    called, answered = function_call(CallId("c1"), "f", "{}"), function_call_output(CallId("c1"), "x")

    check_outputs([called, answered], [])
    check_outputs([answered], [CallId("c1")])
    for items, awaited, param in (
        ([answered, called], [], "input[0].call_id"),
        ([called, answered, answered], [], "input[2].call_id"),
        ([called, called, answered], [], "input[1].call_id"),
        ([called], [], "input"),
        ([], [CallId("c1")], "input"),
    ):
        with pytest.raises(ValidationFailed) as caught:
            check_outputs(items, awaited)
        assert caught.value.param == param


async def test_chains_are_no_sessions(responses: ResponsesDriver) -> None:
    """Responses and conversations are not listed, counted or metered as sessions."""
    me, process = principal(), responses.process
    process.quotas.limit = 1
    await process.session(me)
    for _ in range(3):
        first = await responses.ask(me)
        await responses.ask(me, previous_response_id=first["id"])
    chain = (await responses.service.find(me, first["id"])).record.session_id
    await ConversationService(process.service).create(me, {})

    listed = await process.service.list_sessions(me, PageRequest())
    usage = await process.meter.summarise(me.tenant_id, 0, process.clock.now() + 1, UsageGroup.SESSION)

    assert len(listed.items) == 1
    assert [(row.group, row.requests) for row in usage] == [(None, 6)]
    with pytest.raises(NotFound):
        await process.load(me, chain)
    with pytest.raises(NotFound):
        await process.service.fork(me, chain)


async def test_a_crash_fails_the_response(responses: ResponsesDriver) -> None:
    """A background response fails if its process stops, and the response before it can be continued."""
    me, process = principal(), responses.process
    first = await responses.ask(me)
    process.will_say(Answer("A long story", waits=True))
    running = await responses.start(me, previous_response_id=first["id"], is_background=True)
    await process.engine.half_way.wait()
    await crash()

    after = ResponsesDriver(process.restarted())
    await after.process.service.recover()
    body = await after.service.get(me, running.record.response_id)
    again = await after.ask(me, "Again", previous_response_id=first["id"])

    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    assert again["status"] == "completed"
    with pytest.raises(InvalidRequest, match="failed"):
        await after.ask(me, previous_response_id=body["id"])


async def test_a_crash_of_a_batch_s_response_costs_nothing(responses: ResponsesDriver) -> None:
    """A response that answers a line of a batch is found again after a crash, has failed, and is billed for nothing."""
    process, sent = responses.process, []
    keys = IdempotencyStore(process.database, process.clock, GatewayLease(60.0))
    for batch_id in ("batch_1", None):
        attempt = await keys.begin("ten_1", f"line of {batch_id}", "0" * 64)
        assert isinstance(attempt, Attempt)
        request_id = RequestId("batch_1.1.1")
        line = None if batch_id is None else LineOfBatch(batch_id, request_id, lambda turn_id, _: turn_id.encode())
        claim = TurnClaim(attempt, lambda _, turn_id: turn_id.encode(), line)
        process.will_say(Answer("A long story", waits=True))
        sent.append(await responses.start(replace(principal(), turn_claim=claim)))
        await process.engine.half_way.wait()
        process.engine.half_way.clear()
        await process.until_delivered(principal(), sent[-1].record.session_id)
    await crash()

    after = ResponsesDriver(process.restarted())
    await after.process.service.recover()
    order = NewResponse("tiny", (), SessionSettings(), {"store": True, "background": False, "model": "tiny"})
    found = await after.service.resume(principal(), order, sent[0].record.turn_id)
    usage = await UsageMeter(process.database).summarise(TenantId("ten_1"), 0, 2**40, UsageGroup.BATCH)

    assert (await found.result())["status"] == "failed"
    assert await after.service.failed_by_server(principal(), found.record.response_id)
    assert [(row.group, row.requests) for row in usage] == [(None, 1)]


async def test_a_response_whose_process_died_before_it_was_listed(responses: ResponsesDriver) -> None:
    """If a process dies between the begin of a turn and the record of its response, to resume it stores the record."""
    me = principal()
    made = await responses.ask(me)
    await ResponseStore(responses.process.database).delete(me.scope(), made["id"])
    order = NewResponse("tiny", (), SessionSettings(), {"store": True, "background": False, "model": "tiny"})

    with pytest.raises(NotFound):
        await responses.service.get(me, made["id"])
    found = await responses.service.resume(me, order, turn_of(made["id"]))

    assert (await found.result())["output"] == made["output"]
    assert (await responses.service.get(me, made["id"]))["output"] == made["output"]


async def test_cancelling_one_response_spares_the_next(responses: ResponsesDriver) -> None:
    """A cancel of an ended response does not touch another one that runs on the same chain."""
    me, process = principal(), responses.process
    first = await responses.ask(me)
    process.will_say(Answer("A long story", waits=True))
    second = await responses.start(me, previous_response_id=first["id"], is_background=True)
    await process.engine.half_way.wait()

    untouched = await responses.service.cancel(me, first["id"])
    elsewhere = ResponsesDriver(SessionProcess(process.database, process.clock, "second"))
    assert await elsewhere.service.cancel(me, first["id"]) == first
    assert not (await process.service.loader.load_any(me.scope(), second.record.session_id)).cancel_requested
    running = await responses.service.get(me, second.record.response_id)
    cancelled = await responses.service.cancel(me, second.record.response_id)

    assert untouched == first
    assert (running["status"], running["output"]) == ("in_progress", [])
    assert cancelled["status"] == "cancelled"
    assert cancelled["usage"]["output_tokens"] > 0


async def test_a_conversation_takes_one_response_at_a_time(responses: ResponsesDriver) -> None:
    """A second response in a conversation is a conflict while one runs, and a running response cannot be continued."""
    me, process = principal(), responses.process
    conversation = await ConversationService(process.service).create(me, {})
    process.will_say(Answer("A long story", waits=True))
    running = await responses.start(me, conversation_id=conversation.session_id, is_background=True)
    await process.engine.half_way.wait()

    with pytest.raises(Conflict):
        await responses.ask(me, conversation_id=conversation.session_id)
    with pytest.raises(InvalidRequest, match="running"):
        await responses.ask(me, previous_response_id=running.record.response_id)
    process.engine.go_on()

    assert (await running.result())["status"] == "completed"


async def test_tenants_do_not_meet(responses: ResponsesDriver) -> None:
    """Another tenant's responses and conversations do not exist."""
    me, other = principal(), principal("ten_2")
    mine = await responses.ask(me)
    conversation = await ConversationService(responses.process.service).create(me, {})

    for action in (responses.service.get, responses.service.find, responses.service.cancel, responses.service.delete):
        with pytest.raises(NotFound):
            await action(other, mine["id"])
    with pytest.raises(InvalidRequest):
        await responses.ask(other, previous_response_id=mine["id"])
    with pytest.raises(NotFound):
        await responses.ask(other, conversation_id=conversation.session_id)
    with pytest.raises(NotFound):
        await responses.service.get(me, "resp_\x00é")
