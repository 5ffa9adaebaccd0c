"""Tests of the rows of responses: none of unstored ones, and none that nothing uses."""

from typing import Any

import pytest

from graftwork.platform.database import Database
from graftwork.platform.errors import CapacityContended, InvalidRequest, NotFound, ValidationFailed
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.items import Item
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.responses.input import read_input
from graftwork.sessions.responses.service import RETENTION_S
from tests.sessions.responses_driver import CALLS, ResponsesDriver, count_rows, outputs
from tests.sessions.session_process import WEATHER, Answer, SessionProcess, crash, principal


@pytest.fixture
async def responses(sqlite_database: Database) -> ResponsesDriver:
    return ResponsesDriver(SessionProcess(sqlite_database))


@pytest.fixture
async def responses_on_either(database: Database) -> ResponsesDriver:
    """Responses on SQLite, then on PostgreSQL."""
    return ResponsesDriver(SessionProcess(database))


async def test_an_unstored_response_leaves_no_row(responses_on_either: ResponsesDriver) -> None:
    """With `store: false` nothing can be read and no table keeps a row, even after a fork of a stored response."""
    me, responses = principal(), responses_on_either
    process = responses.process
    process.will_say(
        CALLS, "ok", CALLS, Answer(failure=CapacityContended("full")), Answer(refusal=CapacityContended("x"))
    )
    stored = await responses.ask(me, tools=(WEATHER,))
    before = await count_rows(process.database)

    fork = await responses.ask(me, outputs(stored), previous_response_id=stored["id"], is_stored=False)
    alone = await responses.ask(me, tools=(WEATHER,), is_stored=False)
    failed = await responses.ask(me, is_stored=False)
    refused = await responses.start(me, is_stored=False)
    with pytest.raises(CapacityContended):
        await refused.admitted()

    assert [body["status"] for body in (fork, alone, failed)] == ["completed", "completed", "failed"]
    assert await count_rows(process.database) == before
    for body in (fork, alone, failed):
        with pytest.raises(NotFound):
            await responses.service.get(me, body["id"])
        with pytest.raises(InvalidRequest):
            await responses.ask(me, previous_response_id=body["id"])


async def test_a_refused_response_leaves_no_row(responses: ResponsesDriver) -> None:
    """A response that the quota, the engine or a check refuses leaves no row."""
    me, process = principal(), responses.process
    process.will_say(Answer(refusal=CapacityContended("full")))

    refused = await responses.start(me)
    with pytest.raises(CapacityContended):
        await refused.admitted()
    with pytest.raises(ValidationFailed):
        await responses.ask(me, [{"type": "function_call_output", "call_id": "c", "output": "x"}])
    with pytest.raises(NotFound):
        await responses.ask(me, model="grfat")
    with pytest.raises(ValidationFailed):
        await responses.ask(me, tool_choice="loudest")

    assert set((await count_rows(process.database)).values()) == {0}


async def test_deleting_removes_unused_rows(responses_on_either: ResponsesDriver) -> None:
    """Rows stay while a response or a fork uses them, and all go with the last one."""
    me, responses = principal(), responses_on_either
    process = responses.process
    process.will_say(CALLS)
    first = await responses.ask(me, tools=(WEATHER,))
    second = await responses.ask(me, outputs(first), previous_response_id=first["id"])
    fork = await responses.ask(me, outputs(first), previous_response_id=first["id"])
    leaf = await responses.ask(me, "On", previous_response_id=fork["id"], is_stored=True)

    for body in (first, second, fork):
        await responses.service.delete(me, body["id"])
    again = await responses.ask(me, "Still", previous_response_id=leaf["id"])
    for body in (leaf, again):
        await responses.service.delete(me, body["id"])

    assert again["status"] == "completed"
    assert set((await count_rows(process.database)).values()) == {0}
    with pytest.raises(NotFound):
        await responses.service.delete(me, again["id"])


async def test_a_crash_leaves_no_row_of_an_unstored_response(responses: ResponsesDriver) -> None:
    """Recovery deletes an unstored response whose process has stopped."""
    me, process = principal(), responses.process
    stored = await responses.ask(me)
    before = await count_rows(process.database)
    process.will_say(Answer("A long story", waits=True))
    await responses.start(me, "Hi", previous_response_id=stored["id"], is_stored=False)
    await process.engine.half_way.wait()
    await crash()

    await process.restarted().service.recover()

    assert await count_rows(process.database) == before


async def test_a_closed_conversation_is_deleted_with_its_responses(responses_on_either: ResponsesDriver) -> None:
    """A conversation closed as a session stays readable for its time to live; then all rows go that no fork uses."""
    me, responses = principal(), responses_on_either
    process = responses.process
    conversation = await ConversationService(process.service).create(me, {})
    inside = await responses.ask(me, conversation_id=conversation.session_id)
    fork = await responses.ask(me, "On", previous_response_id=inside["id"])
    await process.service.close_session(me, conversation.session_id)
    assert await responses.service.get(me, inside["id"]) == inside

    process.clock.advance(30 * 86_400.0)
    await process.service.sweep()

    with pytest.raises(NotFound):
        await responses.service.get(me, inside["id"])
    again = await responses.ask(me, "And on", previous_response_id=fork["id"])
    for body in (fork, again):
        await responses.service.delete(me, body["id"])
    await process.service.sweep()
    assert again["status"] == "completed"
    assert set((await count_rows(process.database)).values()) == {0}


async def test_an_unstored_response_that_is_left_behind_is_swept(responses: ResponsesDriver) -> None:
    """The sweep deletes an unstored response that was left behind for an hour."""
    me, process = principal(), responses.process
    stored = await responses.ask(me)
    before = await count_rows(process.database)
    left = await responses.start(me, "Hi", previous_response_id=stored["id"], is_stored=False)
    await left.result()

    await process.service.sweep()
    early = await count_rows(process.database)
    process.clock.advance(3601)
    await process.service.sweep()

    assert early["sessions"] == before["sessions"] + 1
    assert await count_rows(process.database) == before


async def test_responses_go_when_their_time_is_over(responses_on_either: ResponsesDriver) -> None:
    """After 30 days a response's rows are deleted, unless a younger response or a conversation uses them."""
    me, responses = principal(), responses_on_either
    process = responses.process
    conversation = await ConversationService(process.service).create(me, {})
    inside = await responses.ask(me, "In", conversation_id=conversation.session_id)
    alone, first = await responses.ask(me, "Alone"), await responses.ask(me, "First")
    process.clock.advance(RETENTION_S - 1)
    second = await responses.ask(me, "Second", previous_response_id=first["id"])
    early = await responses.service.sweep()
    process.clock.advance(2)

    swept = await responses.service.sweep()

    assert (early, swept) == (0, 3)
    for body in (inside, alone, first):
        with pytest.raises(NotFound):
            await responses.service.get(me, body["id"])
    third = await responses.ask(me, "Third", previous_response_id=second["id"])
    assert process.engine.requests[-1].prompt_token_ids[: second["usage"]["input_tokens"]] == (
        process.engine.requests[-2].prompt_token_ids
    )
    said = await ConversationService(process.service).items(me, conversation.session_id, PageRequest())
    assert [item.text for item in said.items] == ["ok", "In"]
    await ConversationService(process.service).delete(me, conversation.session_id)
    for body in (second, third):
        await responses.service.delete(me, body["id"])
    assert set((await count_rows(process.database)).values()) == {0}


async def test_a_deleted_conversation_leaves_its_responses(responses: ResponsesDriver) -> None:
    """The responses of a deleted conversation can be read and continued; all rows go with the last one."""
    me, process = principal(), responses.process
    conversations = ConversationService(process.service)
    conversation = await conversations.create(me, {})
    empty = await conversations.create(me, {})
    begun = await conversations.create(me, {}, read_input("Hello"))
    first = await responses.ask(me, conversation_id=conversation.session_id)

    for each in (conversation, empty, begun):
        await conversations.delete(me, each.session_id)
        with pytest.raises(NotFound):
            await conversations.get(me, each.session_id)
        with pytest.raises(NotFound):
            await process.load(me, each.session_id)
    second = await responses.ask(me, previous_response_id=first["id"])
    for body in (first, second):
        assert await responses.service.get(me, body["id"]) == body
        await responses.service.delete(me, body["id"])

    assert set((await count_rows(process.database)).values()) == {0}


async def test_a_deleted_item_stays_with_the_responses_that_saw_it(responses_on_either: ResponsesDriver) -> None:
    """A deletion shortens the conversation, but no response from before it; all rows go with the last one."""
    me, responses = principal(), responses_on_either
    process = responses.process
    conversations = ConversationService(process.service)
    conversation = (await conversations.create(me, {}, read_input("Hello"))).session_id
    before = await responses.ask(me, "One", conversation_id=conversation)
    page = PageRequest(order=Order.ASCENDING)
    hello, one, answer = (await conversations.items(me, conversation, page)).items

    await conversations.delete_item(me, conversation, one.item_id)
    after = await responses.ask(me, "Two", conversation_id=conversation)

    left = (await conversations.items(me, conversation, page)).items
    assert [item.text for item in left] == ["Hello", "ok", "Two", "ok"]
    with pytest.raises(NotFound):
        await conversations.item(me, conversation, one.item_id)
    history = [message_of(hello), message_of(answer), {"role": "user", "content": "Two"}]
    await responses.ask(me, history)
    assert process.engine.requests[-1].prompt_token_ids == process.engine.requests[-2].prompt_token_ids
    for body, shown in ((before, [hello, one, answer]), (after, left)):
        await responses.ask(me, "On", previous_response_id=body["id"])
        continued = process.engine.requests[-1].prompt_token_ids
        await responses.ask(me, [*map(message_of, shown), {"role": "user", "content": "On"}])
        assert process.engine.requests[-1].prompt_token_ids == continued
    await conversations.delete(me, conversation)
    await responses.delete_all()
    assert set((await count_rows(process.database)).values()) == {0}


async def test_a_call_and_its_output_are_deleted_together(responses_on_either: ResponsesDriver) -> None:
    """Deleting either half of an answered call deletes both, and deleting a call that waits ends the waiting for it."""
    me, responses = principal(), responses_on_either
    process, conversations = responses.process, ConversationService(responses.process.service)
    conversation = (await conversations.create(me, {})).session_id
    process.will_say(CALLS, "cold", CALLS)
    asked: dict[str, Any] = {"tools": (WEATHER,), "conversation_id": conversation}
    first = await responses.ask(me, **asked)
    await responses.ask(me, outputs(first), **asked)
    second = await responses.ask(me, "And now?", **asked)
    oslo, rome = [item for item in second["output"] if item["type"] == "function_call"]

    page = PageRequest(order=Order.ASCENDING)
    items = (await conversations.items(me, conversation, page)).items
    call, output = items[1], items[4]
    assert (call.is_call, output.is_output, call.call_id == output.call_id) == (True, True, False)
    await conversations.delete_item(me, conversation, call.item_id)
    await conversations.delete_item(me, conversation, output.item_id)
    await conversations.delete_item(me, conversation, output.item_id)
    await conversations.delete_item(me, conversation, oslo["id"])

    left = (await conversations.items(me, conversation, page)).items
    assert [item.body.get("name") or item.text for item in left] == ["Hi", "cold", "And now?", "get_weather"]
    session = await conversations.get(me, conversation)
    assert session.awaited_call_ids == (rome["call_id"],)
    (fork,) = await process.service.fork(me, conversation)
    assert fork.awaited_call_ids == (rome["call_id"],)
    with pytest.raises(ValidationFailed):
        await responses.ask(me, outputs(second), **asked)
    assert (await responses.ask(me, outputs(second)[1:], **asked))["status"] == "completed"


def message_of(item: Item) -> dict[str, Any]:
    return {"role": item.body["role"], "content": item.text}
